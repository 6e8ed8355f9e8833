"""Which gradients of Gluon parameters are fresh: written by a backward since the last step.

MXNet marks the weight. A stale gradient belongs to an earlier step and an earlier scale: it is neither
checked, nor summed, nor applied.
"""

from __future__ import annotations

from typing import Sequence

from mxnet.gluon import Parameter

from ..step.updater import Update
from . import _mxnet

__all__ = ["clear_stale", "forget", "fresh_updates"]


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
            if _mxnet.is_fresh(data):
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
        fresh = [_mxnet.is_fresh(data) for data, _ in pairs]
        if any(fresh) and not all(fresh):
            for grad in (g for (_, g), ok in zip(pairs, fresh) if not ok):
                grad[:] = 0


def forget(updates: Sequence[Update]) -> None:
    """Call their gradients stale."""
    for update in updates:
        _mxnet.mark_stale(update.weight)
