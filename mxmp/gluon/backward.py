"""A scaled backward, which serves all trainers with one scaler, and the gradients that it leaves for their steps.

A gradient is due to a step if a backward has written it since the last one. A stale gradient belongs to an earlier
step and an earlier scale: it is neither checked, nor summed, nor applied. MXNet marks the weights whose gradients a
backward has written as fresh. After a scaled backward these marks are moved to the Parameter, so that a mark of MXNet's
is then of an unscaled backward, whose gradients the step must not divide by the scale; and MXNet's own Trainer finds no
gradient that it may apply.

Trainers that share a loss share one scaler object, or no backward reaches both: gradients of two losses at two scales
in one buffer would give wrong updates.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..step.phase import Event, Phase, Progress
from ..step.updater import Update
from . import _mxnet
from .scaling import Record, recorded_name, refuse_hidden_heads, refuse_unscaled_heads

__all__ = [
    "add_trainer",
    "due_updates",
    "make_stale",
    "mark_fresh",
    "note_scaled_gradients",
    "refuse_unscaled_gradients",
    "scaled_backward",
    "zero_stale",
]

# Global: all trainers that live. A backward must know of trainers with other scalers whose gradients it would
# overwrite, and no object leads from a loss to them.
_trainers: weakref.WeakSet[Any] = weakref.WeakSet()


def add_trainer(trainer: Any) -> None:
    """Add a trainer to those that a backward checks, for as long as it lives."""
    _trainers.add(trainer)


@contextmanager
def scaled_backward(trainer: Any, record: Record, factors: Sequence[NDArray] = ()) -> Iterator[None]:
    """Prepare for one scaled backward in this block, which serves all trainers with the same scaler object.

    ``factors``: what the losses were multiplied by, arrays with a gradient each, where the user calls backward.
    They tell a backward of the scaled losses from one of others; it may also come after the block.

    Raises ``ValueError`` for a loss head that the scale would not reach. Raises ``RuntimeError`` where one of the
    trainers has looked at its gradients and not stepped, or the backward would write gradients that a trainer with
    another scaler has yet to apply, or add to those of an unscaled backward: no gradient has been written then. And
    where the backward was not of the scaled losses: ``step`` will refuse its gradients.
    """
    group = trainer.scaler_group
    others = [other for other in list(_trainers) if other is not trainer]
    peers = [trainer, *(other for other in others if group is not None and other.scaler_group is group)]
    others = [other for other in others if other not in peers]
    _check_and_begin(trainer, peers, others, record)
    if trainer.loss_scale == 1.0:
        yield
        return
    own = [param for peer in peers for param in _mxnet.parameters_of(peer)]
    of_others = list(_reached([param for other in others for param in _mxnet.parameters_of(other)], record))
    before = _mxnet.fresh_weights(own, clear=True)
    try:
        yield
    finally:
        written = _mxnet.fresh_weights(own, clear=True)
        scaled = not factors or any(map(_mxnet.is_fresh, factors))
        if scaled:
            _note_scaled(written)
            _mxnet.fresh_weights(of_others, clear=True)  # at this scale, which is not their trainer's
            names = {id(array) for _, array in written}
            mark_fresh(array for _, array in before if id(array) not in names)
        else:
            mark_fresh(array for _, array in [*before, *written])
    if not scaled and written:
        for peer in peers:
            peer.progress = Progress()
        raise RuntimeError(
            "a backward within scale_loss was not of the scaled loss, so its gradients are not scaled, and the update "
            f"would divide them by {trainer.loss_scale:g}: with trainer.scale_loss(loss) as scaled: scaled.backward()"
        )
    for peer in peers if not scaled else ():
        peer.progress.factors += factors  # the backward is still to come


def _check_and_begin(trainer: Any, peers: Sequence[Any], others: Sequence[Any], record: Record) -> None:
    scale = trainer.loss_scale
    if scale != 1.0:
        refuse_unscaled_heads(record, scale)
        trained = [p for peer in peers for p in _mxnet.parameters_of(peer) if p.grad_req != "null"]
        refuse_hidden_heads(record, scale, (array for param in trained for array in _mxnet.arrays(param)))
    for other in others:
        if other.progress.phase is not Phase.READY:
            for param in _reached(_mxnet.parameters_of(other), record):
                raise RuntimeError(
                    f"this backward reaches {param.name!r}, whose gradient another mxmp.Trainer has scaled and not "
                    "applied: step that trainer first, or give both the same scaler object "
                    "(scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for both"
                )
    for peer in peers:
        peer.progress.check(Event.BACKWARD, scale)
        if scale != 1.0:
            refuse_unscaled_gradients([p for p in _mxnet.parameters_of(peer) if p.grad_req == "add"], scale)
    for peer in peers:
        peer.progress.note(Event.BACKWARD, scale)
        peer.watch_statistics()
    trainer.scaled_step.group.note_backward()


def _reached(params: Iterable[Parameter], record: Record) -> Iterator[Parameter]:
    """Yield the parameters whose gradients a backward from the record writes."""
    for param in params:
        arrays = _mxnet.arrays(param) if param.grad_req != "null" else ()
        if any(recorded_name(array) in record.leaves for array in arrays):
            yield param


# -- the gradients that are due ---------------------------------------------------------------------


def due_updates(params: Sequence[Parameter], *, ignore_stale: bool) -> list[Update]:
    """Return the weights that a step would update, with their gradients.

    Raises ``UserWarning`` on a stale gradient unless ``ignore_stale``, as ``gluon.Trainer`` does.
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


def zero_stale(params: Sequence[Parameter]) -> None:
    """Set stale gradients of parameters that only some devices ran to zero, for the sum over devices."""
    for param in params:
        pairs = _mxnet.with_gradients(param)
        stale = [grad for data, grad in pairs if not _is_due(param, data)]
        for grad in stale if len(stale) < len(pairs) else ():
            grad[:] = 0


def make_stale(params: Sequence[Parameter], updates: Sequence[Update]) -> None:
    """Make the gradients of ``updates`` stale."""
    for update in updates:
        _mxnet.set_fresh(update.weight, fresh=False)
        vars(params[update.index]).pop("mxmp_scaled", None)


def mark_fresh(weights: Iterable[NDArray]) -> None:
    """Mark weights as MXNet does when it has written their gradients."""
    for array in weights:
        _mxnet.set_fresh(array, fresh=True)


def note_scaled_gradients(params: Iterable[Parameter]) -> None:
    """Record that a scaled backward has written the gradients that MXNet has marked; clear the marks."""
    _note_scaled(_mxnet.fresh_weights(params, clear=True))


def _note_scaled(weights: Iterable[tuple[Parameter, NDArray]]) -> None:
    for param, array in weights:
        param.mxmp_scaled = [*getattr(param, "mxmp_scaled", ()), array]


def _is_due(param: Parameter, weight: NDArray) -> bool:
    return _mxnet.is_fresh(weight) or any(array is weight for array in getattr(param, "mxmp_scaled", ()))


def refuse_unscaled_gradients(params: Sequence[Parameter], loss_scale: float) -> None:
    """Raise ``RuntimeError`` where an unscaled backward has written gradients of ``params``.

    Synchronizes only where there are such gradients: zeros are right at every scale.
    """
    for param, data in _mxnet.fresh_weights(params):
        if param.grad(data.context).asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {param.name!r} on {data.context}, and the update "
                f"would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'), or "
                "autograd.grad for gradients that are no part of it"
            )
