"""Which gradients of Gluon parameters are due to a step: written by a backward since the last one.

MXNet marks the weight. A stale gradient belongs to an earlier step and an earlier scale: it is neither
checked, nor summed, nor applied. Behind a scaled backward its marks are moved to the Parameter, so that
a mark of MXNet's is then of a plain backward, whose gradients the step must not divide by the scale; and
a plain ``gluon.Trainer`` finds no gradient that it may apply.
"""

from __future__ import annotations

from typing import Iterable, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..step.updater import Update
from . import _mxnet

__all__ = ["claim", "clear_stale", "forget", "fresh_updates", "put_back", "refuse_plain_gradients", "take"]


def fresh_updates(params: Sequence[Parameter], *, ignore_stale: bool) -> list[Update]:
    """Everything that a step would update.

    Raises
    ------
    UserWarning
        On a stale gradient unless ``ignore_stale``, as ``gluon.Trainer`` does.
    """
    found = []
    for index, param in enumerate(params):
        for device, (data, grad) in enumerate(_mxnet.with_gradients(param)):
            if _is_due(param, data):
                found.append(Update(index, device, param.name, data, grad))
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
        pairs = _mxnet.with_gradients(param)
        due = [_is_due(param, data) for data, _ in pairs]
        if any(due) and not all(due):
            for grad in (g for (_, g), ok in zip(pairs, due) if not ok):
                grad[:] = 0


def forget(params: Sequence[Parameter], updates: Sequence[Update]) -> None:
    """Call their gradients stale."""
    for update in updates:
        _mxnet.mark_stale(update.weight)
        _release(params[update.index])


def take(params: Iterable[Parameter]) -> list[tuple[Parameter, NDArray]]:
    """The weights that MXNet has marked, with their parameters; the marks are cleared."""
    return _mxnet.fresh(params, clear=True)


def put_back(weights: Iterable[tuple[Parameter, NDArray]]) -> None:
    """Undo ``take``."""
    for _, array in weights:
        _mxnet.mark_fresh(array)


def claim(weights: Iterable[tuple[Parameter, NDArray]]) -> None:
    """Note that a scaled backward has written the gradients of these."""
    for param, array in weights:
        claimed = getattr(param, "mxmp_scaled", ())
        param.mxmp_scaled = [*claimed, array] if claimed else [array]


def refuse_plain_gradients(params: Sequence[Parameter], loss_scale: float) -> None:
    """Raise ``RuntimeError`` where a plain backward has written gradients of ``params``, which were then not scaled.

    Synchronizes only where there are such gradients: zeros are right at every scale.
    """
    for param, data in _mxnet.fresh(params):
        if param.grad(data.context).asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {param.name!r} on {data.context}, and the update "
                f"would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'), or "
                "autograd.grad for gradients that are no part of it"
            )


def _is_due(param: Parameter, weight: NDArray) -> bool:
    return _is_claimed(param, weight) or _mxnet.is_fresh(weight)


def _is_claimed(param: Parameter, weight: NDArray) -> bool:
    return any(array is weight for array in getattr(param, "mxmp_scaled", ()))


def _release(param: Parameter) -> None:
    if hasattr(param, "mxmp_scaled"):
        del param.mxmp_scaled
