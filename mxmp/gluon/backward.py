"""A scaled backward, which serves all trainers with one scaler, and the gradients that it leaves for their steps.

A step applies the gradients that a backward has written since the last step. A stale gradient is one of an earlier
step, with an earlier loss scale in it: a step neither checks nor applies it. MXNet marks each weight whose gradient a
backward has written as fresh. After a scaled backward, mxmp removes these marks and lists the weights in their
Parameters. A fresh mark that is found later is then that of an unscaled backward, whose gradients the step must not
divide by the loss scale. And MXNet's own Trainer, which reads the marks, finds no scaled gradient to apply.

Two trainers that are to apply gradients of one backward share one scaler object: gradients of two losses at two scales
in one buffer would give wrong updates.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..step.phase import Event, Phase, Progress
from ..step.updater import Update
from . import _mxnet
from .scaled_reads import stop_warning, warn_of_reads
from .scaling import (
    Record,
    living_trainers,
    recorded_name,
    refuse_hidden_heads,
    refuse_late_scale,
    refuse_unscaled_heads,
)


@contextmanager
def scaled_backward(trainer: Any, record: Record, factors: Sequence[NDArray] = ()) -> Iterator[None]:
    """Prepare for a backward of scaled losses, run the ``with`` block that does it, and note which gradients it wrote.

    The backward serves ``trainer``, and each trainer with the same scaler object that has a parameter which the
    backward reaches. MXNet marks each weight as fresh whose gradient a backward has written. At a loss scale other than
    1 this function removes these marks when the block ends, and lists the weights in the attribute ``mxmp_scaled`` of
    their Parameters instead. So a fresh mark that is found later shows a backward without the loss scale. If the
    backward also writes gradients of a trainer with another scaler, they contain a loss scale that is wrong for that
    trainer. Their marks are removed too, but the weights are not listed, so that trainer does not apply these
    gradients. At a loss scale of 1 all marks stay.

    Before the block, waits for the device if it must copy running statistics, or examine unscaled gradients.

    Parameters
    ----------
    trainer : mxmp.Trainer
        The trainer whose ``backward`` or ``scale_loss`` was called.
    record : Record
        The graphs of the losses, as autograd recorded them.
    factors : sequence of NDArray
        For ``scale_loss``, where the user calls backward: the arrays by which the losses were multiplied, each with a
        gradient of its own. A backward of the scaled losses writes the gradients of these arrays, a backward of other
        losses does not. Empty for ``Trainer.backward``.

    Raises
    ------
    ValueError
        Before the block, at a loss scale other than 1: the losses contain a loss head (an operator that writes its own
        gradient, as ``SoftmaxOutput``) that ignores the loss scale.
    RuntimeError
        Before the block, in three cases. First: a trainer that the backward serves has called ``unscale`` or
        ``clip_global_norm`` since its last step, or has called ``allreduce_grads`` while a parameter has
        ``grad_req="add"``. Second: the backward would write gradients of a trainer with another scaler, and that
        trainer has not stepped since its own scaled backward. Third, at a loss scale other than 1: a trainer that
        the backward serves has a parameter with ``grad_req="add"``, and a backward without the loss scale has written
        its gradient, which is not all zeros. After the block, at a loss scale other than 1: a backward of other losses
        than the scaled ones has written gradients.
    """
    group = trainer.scaler_group
    others = [other for other in list(living_trainers) if other is not trainer]
    sharing = [other for other in others if group is not None and other.scaler_group is group]
    # A trainer of the group that has a loss of its own, as in a GAN, and that this backward does not reach, is no peer.
    peers = [trainer, *(other for other in sharing if any(_reached(_mxnet.parameters_of(other), record)))]
    others = [other for other in others if other not in sharing]
    _check_and_begin(trainer, peers, others, record)
    if trainer.loss_scale == 1.0:
        yield
        return
    own = [param for peer in peers for param in _mxnet.parameters_of(peer)]
    of_others = [(other, list(_reached(_mxnet.parameters_of(other), record))) for other in others]
    before = _mxnet.fresh_weights(own, clear=True)
    if factors:  # the user's code runs in the block
        _warn_of_reads(peers, own)
    try:
        yield
    finally:
        written = _mxnet.fresh_weights(own, clear=True)
        scaled = not factors or any(map(_mxnet.is_fresh, factors))
        if scaled:
            note_scaled(written)
            for other, params in of_others:
                _mxnet.fresh_weights(params, clear=True)  # at this scale, which is not their trainer's
                other.progress.written_by_other = other.progress.written_by_other or bool(params)
            names = {id(array) for _, array in written}
            mark_fresh(array for _, array in before if id(array) not in names)
        else:
            mark_fresh(array for _, array in [*before, *written])
        stop_warning(param for param in own if factors and not getattr(param, "mxmp_scaled", ()))
        _warn_of_reads(peers, [param for param, _ in written] if scaled else ())
    if not scaled and written:
        for peer in peers:
            peer.progress = Progress()
        raise RuntimeError(
            "a backward within scale_loss was not of the scaled loss, so its gradients are not scaled, and the update "
            f"would divide them by {trainer.loss_scale:g}: with trainer.scale_loss(loss) as scaled: scaled.backward()"
        )


def _warn_of_reads(peers: Sequence[Any], params: Iterable[Parameter]) -> None:
    """Let reads of the gradients of ``params`` get a warning, each of the trainer, one of ``peers``, that has it."""
    ids = set(map(id, params))
    for peer in peers:
        warn_of_reads([param for param in _mxnet.parameters_of(peer) if id(param) in ids], peer)


def _check_and_begin(trainer: Any, peers: Sequence[Any], others: Sequence[Any], record: Record) -> None:
    """Do the checks of ``scaled_backward`` that come before the backward, then note the backward in all ``peers``.

    ``peers`` are ``trainer`` and the trainers with its scaler object whose gradients the backward writes; ``others``
    are the mxmp.Trainers with other scalers. Each peer notes the backward in its ``progress``, and copies the running
    statistics that the backward may overwrite. From now on the scaler does not adjust the loss scale until all peers
    have stepped. Raises the errors that ``scaled_backward`` raises before its block; no peer has noted anything then.
    """
    scale = trainer.loss_scale
    if scale != 1.0:
        refuse_unscaled_heads(record, scale)
        refuse_late_scale(record, scale)
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
    trainer.scaled_step.group.note_backward(peer.scaled_step for peer in peers)


def _reached(params: Iterable[Parameter], record: Record) -> Iterator[Parameter]:
    """Yield those of ``params`` whose gradients a backward from the losses of ``record`` would write."""
    for param in params:
        arrays = _mxnet.arrays(param) if param.grad_req != "null" else ()
        if any(recorded_name(array) in record.leaves for array in arrays):
            yield param


# -- the gradients that are due ---------------------------------------------------------------------


def due_updates(params: Sequence[Parameter], *, ignore_stale: bool) -> list[Update]:
    """Return an ``Update`` for each weight array, on each device, with a gradient written since the last step.

    An ``Update`` holds the weight array and its gradient. ``Update.index`` is a position in ``params``. If a gradient
    was not written since the last step, this function raises ``UserWarning`` as an exception, like ``gluon.Trainer``;
    with ``ignore_stale=True`` it leaves out that weight instead. Parameters with ``grad_req="null"`` are always left
    out.
    """
    found: list[Update] = []
    stale: tuple = ()
    for index, param in enumerate(params):
        for device, (data, grad) in enumerate(_mxnet.with_gradients(param)):
            if _is_due(param, data):
                found.append(Update(index, device, param.name, data, grad))
            else:
                stale = stale or (param.name, data.context)
    if stale and not ignore_stale:
        what = (
            "If only a part of the net was used on purpose, call step with ignore_stale_grad=True"
            if found
            else "Nor has any other gradient of this trainer: the loss reaches none of its parameters. Was it computed "
            "by another net? A trainer is made over the parameters of the net that it trains, net.collect_params()"
        )
        raise UserWarning(
            f"Gradient of Parameter `{stale[0]}` on context {stale[1]} has not been updated by backward since last "
            f"`step`. {what}"
        )
    return found


def zero_stale(params: Sequence[Parameter]) -> None:
    """Set a parameter's gradient on a device to zero if only other devices have written theirs since the last step.

    This is the case if the batch on some devices leaves out a part of the net. The caller then sums the gradients over
    devices; without the zeros the sum would contain the old gradient.
    """
    for param in params:
        pairs = _mxnet.with_gradients(param)
        stale = [grad for data, grad in pairs if not _is_due(param, data)]
        for grad in stale if len(stale) < len(pairs) else ():
            grad[:] = 0


def make_stale(params: Sequence[Parameter], updates: Sequence[Update]) -> None:
    """Mark the gradients of ``updates`` as used up, so that the next step does not apply them again.

    ``Update.index`` is a position in ``params``.
    """
    for update in updates:
        _mxnet.set_fresh(update.weight, fresh=False)
        vars(params[update.index]).pop("mxmp_scaled", None)
    stop_warning(params[index] for index in {update.index for update in updates})


def mark_fresh(weights: Iterable[NDArray]) -> None:
    """Set MXNet's fresh mark on ``weights``, which says that a backward has written their gradients."""
    for array in weights:
        _mxnet.set_fresh(array, fresh=True)


def note_scaled(written: Iterable[tuple[Parameter, NDArray]]) -> None:
    """Add each weight array to the list ``mxmp_scaled`` of its Parameter, unless the list has it already.

    The list says which gradients contain the loss scale. ``written`` has pairs of a Parameter and its weight array on a
    device. The caller must have removed MXNet's fresh mark from these arrays, so that a mark that is found later shows
    another backward.
    """
    for param, array in written:
        others = [each for each in getattr(param, "mxmp_scaled", ()) if each is not array]
        param.mxmp_scaled = [*others, array]


def _is_due(param: Parameter, weight: NDArray) -> bool:
    """Return whether a backward, scaled or not, has written the gradient of ``weight`` since the last step."""
    return _mxnet.is_fresh(weight) or any(array is weight for array in getattr(param, "mxmp_scaled", ()))


def refuse_unscaled_gradients(params: Sequence[Parameter], loss_scale: float) -> None:
    """Raise ``RuntimeError`` if a backward without the loss scale wrote a gradient of ``params`` that is not all zeros.

    The step would divide this gradient by the loss scale; ``loss_scale`` is for the message only. Waits for the device
    only if there was such a backward.
    """
    for param, data in _mxnet.fresh_weights(params):
        if param.grad(data.context).asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {param.name!r} on {data.context}, and the update "
                f"would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'; with "
                "scale_loss, call backward in the block), or autograd.grad for gradients that are no part of it"
            )
