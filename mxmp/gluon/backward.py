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
    """Register ``trainer``, an mxmp.Trainer, so that the backwards of all other trainers know of its parameters.

    It is referenced weakly: a trainer that is deleted is forgotten.
    """
    _trainers.add(trainer)


@contextmanager
def scaled_backward(trainer: Any, record: Record, factors: Sequence[NDArray] = ()) -> Iterator[None]:
    """Prepare for one backward of scaled losses within this block, and record afterwards which gradients it wrote.

    The backward serves ``trainer`` and all trainers with the same scaler object. If the loss scale is not 1, the
    weights whose gradients it wrote are listed on their Parameters (``mxmp_scaled``) when the block ends, and lose
    MXNet's mark that a backward has written their gradients. A mark that is found later then shows an unscaled
    backward.

    Parameters
    ----------
    trainer : mxmp.Trainer
        The trainer whose ``backward`` or ``scale_loss`` was called.
    record : Record
        What autograd recorded of the losses.
    factors : sequence of NDArray
        Only where the user calls backward (``scale_loss``): the arrays, each with a gradient, that the losses were
        multiplied by. They show whether the user ran backward of the scaled losses, which may also happen after the
        block.

    Raises
    ------
    ValueError
        A loss head would ignore the loss scale. No gradient has been written.
    RuntimeError
        Before the block, with no gradient written: one of these trainers has unscaled or clipped its gradients, or
        reduced gradients that add up (``grad_req="add"``), and not stepped; or the backward would overwrite gradients
        that a trainer with another scaler has not applied yet; or it would add to gradients of an unscaled backward.
        After the block: gradients were written, but by the backward of other losses than the scaled ones, so they are
        not scaled.
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
    """Do the checks of ``scaled_backward`` that come before the backward, then let every peer begin a step.

    ``peers``: the trainers with the scaler of ``trainer``, itself included. ``others``: all other mxmp.Trainers. Raises
    ``ValueError`` or ``RuntimeError`` as ``scaled_backward`` says. Each peer records in ``progress`` that a backward
    ran, and saves running statistics that the backward may write; the loss scale is frozen until all peers have
    stepped.
    """
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
    """Yield the parameters of ``params`` whose gradients a backward from the losses of ``record`` would write."""
    for param in params:
        arrays = _mxnet.arrays(param) if param.grad_req != "null" else ()
        if any(recorded_name(array) in record.leaves for array in arrays):
            yield param


# -- the gradients that are due ---------------------------------------------------------------------


def due_updates(params: Sequence[Parameter], *, ignore_stale: bool) -> list[Update]:
    """Return one ``Update`` for each weight array whose gradient is due.

    An ``Update`` holds the parameter's index in ``params``, the device's number, the name, the weight and the gradient.
    A gradient is due if a backward has written it since the last step, and stale otherwise. Parameters with
    ``grad_req`` ``"null"`` have none. With ``ignore_stale`` stale gradients are left out; without it one raises
    ``UserWarning``, as in ``gluon.Trainer``.
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
    """Set gradients of an earlier step to zero, where another device has a newer gradient of the same parameter.

    A batch may leave out a part of the net on some devices. The sum of the gradients over devices, which follows, must
    not contain gradients of an earlier step. Does not wait for the device.
    """
    for param in params:
        pairs = _mxnet.with_gradients(param)
        stale = [grad for data, grad in pairs if not _is_due(param, data)]
        for grad in stale if len(stale) < len(pairs) else ():
            grad[:] = 0


def make_stale(params: Sequence[Parameter], updates: Sequence[Update]) -> None:
    """Mark the gradients of ``updates`` as applied or dropped, so that the next step does not take them for its own.

    ``params``: the trainer's parameters, to which ``Update.index`` refers.
    """
    for update in updates:
        _mxnet.set_fresh(update.weight, fresh=False)
        vars(params[update.index]).pop("mxmp_scaled", None)


def mark_fresh(weights: Iterable[NDArray]) -> None:
    """Set MXNet's mark that a backward has written the gradients of these weight arrays."""
    for array in weights:
        _mxnet.set_fresh(array, fresh=True)


def note_scaled_gradients(params: Iterable[Parameter]) -> None:
    """Record that a scaled backward wrote the gradients of ``params`` that MXNet marks as written; remove the marks.

    What MXNet marks afterwards was then written by an unscaled backward, which the step must refuse.
    """
    _note_scaled(_mxnet.fresh_weights(params, clear=True))


def _note_scaled(weights: Iterable[tuple[Parameter, NDArray]]) -> None:
    """Record, on each Parameter (``mxmp_scaled``), that a scaled backward has written the gradients of weight arrays.

    ``weights``: pairs of a Parameter and its weight array on one device.
    """
    for param, array in weights:
        param.mxmp_scaled = [*getattr(param, "mxmp_scaled", ()), array]


def _is_due(param: Parameter, weight: NDArray) -> bool:
    """Return whether a backward, scaled or not, has written the gradient of ``weight`` since the last step.

    ``weight`` is the array of ``param`` on one device.
    """
    return _mxnet.is_fresh(weight) or any(array is weight for array in getattr(param, "mxmp_scaled", ()))


def refuse_unscaled_gradients(params: Sequence[Parameter], loss_scale: float) -> None:
    """Raise ``RuntimeError`` if a backward of an unscaled loss wrote a gradient of ``params`` that is not zero.

    The step would divide it by ``loss_scale``. Waits for the device only if an
    unscaled backward wrote a gradient, which is then read.
    """
    for param, data in _mxnet.fresh_weights(params):
        if param.grad(data.context).asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {param.name!r} on {data.context}, and the update "
                f"would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'), or "
                "autograd.grad for gradients that are no part of it"
            )
