"""Which gradients of Gluon parameters are fresh: written by a backward since the last step.

MXNet marks the weight, ``data._fresh_grad``. A stale gradient belongs to an earlier step and an earlier
scale: it is neither checked, nor summed, nor applied.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .gradients import Gradient

__all__ = ["Live", "clear_stale", "forget", "live"]


class Live(NamedTuple):
    """One parameter on one device, with a fresh gradient."""

    index: int  # type: ignore[assignment]
    device: int
    name: str
    data: NDArray
    grad: NDArray

    @property
    def gradient(self) -> Gradient:
        return Gradient(self.name, self.grad.as_nd_ndarray())


def live(params: Sequence[Parameter], *, ignore_stale: bool) -> list[Live]:
    """Everything that a step would update.

    Raises
    ------
    UserWarning
        On a stale gradient unless ``ignore_stale``, as ``gluon.Trainer`` does.
    """
    found = []
    for index, param in enumerate(params):
        if param.grad_req == "null":
            continue
        for device, (data, grad) in enumerate(zip(param._check_and_get(param._data, list), param.list_grad())):
            if data._fresh_grad:
                found.append(Live(index, device, param.name, data, grad))
            elif not ignore_stale:
                raise UserWarning(
                    f"Gradient of Parameter `{param.name}` on context {data.context} has not been updated by "
                    "backward since last `step`. If only a part of the net was used on purpose, call step with "
                    "ignore_stale_grad=True"
                )
    return found


def clear_stale(params: Sequence[Parameter]) -> None:
    """Where only some devices ran a parameter, zero what the others hold: it is no part of the sum."""
    for param in params:
        if param.grad_req != "null":
            fresh = [data._fresh_grad for data in param._check_and_get(param._data, list)]
            if any(fresh) and not all(fresh):
                for grad in (g for g, ok in zip(param.list_grad(), fresh) if not ok):
                    grad[:] = 0


def forget(params: Sequence[Parameter]) -> None:
    """Call every gradient stale."""
    for param in params:
        if param.grad_req != "null":
            for data in param._data or ():
                data._fresh_grad = False
