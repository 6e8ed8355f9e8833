"""A scaled backward, which serves all trainers with one scaler, and the gradients that it leaves for their steps.

MXNet marks each weight as fresh whose gradient a backward has written. After a scaled backward, mxmp removes the marks
and lists the weights in ``mxmp_scaled`` of their Parameters. A mark that is found later is that of an unscaled
backward, whose gradients the step must not divide by the loss scale; and MXNet's own Trainer, which reads the marks,
applies no scaled gradient. A gradient that is neither marked nor listed is stale: no step checks or applies it.

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
    """Prepare for a backward of scaled losses, which the ``with`` block does, and note which gradients it wrote.
    Serves ``trainer``, and trainers with its scaler object that the backward reaches. ``factors``, for ``scale_loss``:
    what multiplied the losses; only a backward of the scaled losses writes their gradients."""
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
    # From here on a fresh mark shows a backward without the loss scale. Marks of trainers with another scaler go too,
    # but their weights are not listed: their steps must not apply these gradients.
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
    """Do the checks before a backward, which change nothing if they fail; then note the backward in all ``peers``.
    The loss scale then stays until all peers have stepped. ``others`` are trainers with other scalers."""
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
    """Return an ``Update`` for each weight array with a gradient written since the last step.
    ``Update.index`` is a position in ``params``. A stale gradient raises ``UserWarning``, as in ``gluon.Trainer``,
    unless ``ignore_stale``."""
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
    """Set a gradient on a device to zero if only other devices have written theirs since the last step."""
    for param in params:
        pairs = _mxnet.with_gradients(param)
        # The batch on some devices left out a part of the net; the sum over devices would contain their old gradients.
        stale = [grad for data, grad in pairs if not _is_due(param, data)]
        for grad in stale if len(stale) < len(pairs) else ():
            grad[:] = 0


def make_stale(params: Sequence[Parameter], updates: Sequence[Update]) -> None:
    """Mark the gradients of ``updates`` (``index`` is into ``params``) as used up: no later step applies them."""
    for update in updates:
        _mxnet.set_fresh(update.weight, fresh=False)
        vars(params[update.index]).pop("mxmp_scaled", None)
    stop_warning(params[index] for index in {update.index for update in updates})


def mark_fresh(weights: Iterable[NDArray]) -> None:
    for array in weights:
        _mxnet.set_fresh(array, fresh=True)


def note_scaled(written: Iterable[tuple[Parameter, NDArray]]) -> None:
    """Add each weight array to ``mxmp_scaled`` of its Parameter: its gradient contains the loss scale.
    The caller has removed the fresh mark, so that one that is found later shows another backward."""
    for param, array in written:
        others = [each for each in getattr(param, "mxmp_scaled", ()) if each is not array]
        param.mxmp_scaled = [*others, array]


def _is_due(param: Parameter, weight: NDArray) -> bool:
    """Return whether a backward, scaled or not, has written the gradient of ``weight`` since the last step."""
    return _mxnet.is_fresh(weight) or any(array is weight for array in getattr(param, "mxmp_scaled", ()))


def refuse_unscaled_gradients(params: Sequence[Parameter], loss_scale: float) -> None:
    """Raise ``RuntimeError`` if a backward without the loss scale wrote a gradient of ``params`` that is not all zeros.
    Waits for the device only if there was such a backward."""
    for param, data in _mxnet.fresh_weights(params):
        if param.grad(data.context).asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {param.name!r} on {data.context}, and the update "
                f"would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'; with "
                "scale_loss, call backward in the block), or autograd.grad for gradients that are no part of it"
            )
