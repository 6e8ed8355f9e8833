"""A scaled backward, which serves all trainers with one scaler, and the gradients that it leaves for their steps.

MXNet marks each weight as fresh whose gradient a backward has written. After a scaled backward, mxmp removes the marks
and notes the weights in the trainers' ledgers. A mark that is found later is that of an unscaled backward, whose
gradients the step must not divide by the loss scale; and MXNet's own Trainer, which reads the marks, applies no scaled
gradient. A gradient that is neither marked nor noted is stale: no step checks or applies it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..host.callbacks import hold_interrupts
from ..precision._mxnet import BFLOAT16, dtype_name
from ..precision.heads import HEAD_OPERATORS
from ..step.gradients import Gradient
from ..step.ledger import Event, Ledger
from ..step.updater import Update
from . import _mxnet
from .conversion import trained_since, unowned_parameters
from .graphs import engine_lock
from .parameter import LowParameter, conversions_of
from .record import Record, explain_unrecorded
from .scaled_heads import heads_scaled_by, refuse_late_scale
from .scaled_reads import stop_warning, warn_of_reads
from .scaling import converted_calls, living_trainers
from .static_shape import seen


@contextmanager
def scaled_backward(trainer: Any, record: Record, factors: Sequence[NDArray] = ()) -> Iterator[None]:
    """Prepare for a backward of scaled losses, which the ``with`` block does, and note which gradients it wrote.
    Serves ``trainer``, and trainers with its scaler object that the backward reaches. ``factors``, for ``scale_loss``:
    what multiplied the losses; only a backward of the scaled losses writes their gradients."""
    unowned = [param for param in unowned_parameters() if _is_reached(param, record)]
    with engine_lock(), heads_scaled_by(trainer.loss_scale, record), _noting(trainer, record, factors):
        if factors:  # the user's code runs in the block
            yield
        else:
            with hold_interrupts(), explain_unrecorded(), seen(record):
                yield
    _mxnet.fresh_weights(unowned, clear=True)  # of a net that is only run through, as for a perceptual loss


@contextmanager
def _noting(trainer: Any, record: Record, factors: Sequence[NDArray]) -> Iterator[None]:
    """Check that the backward may run, and note in the ledgers what it has written."""
    peers, others = _peers(trainer, record)
    _check_and_begin(trainer, peers, others, record)
    if trainer.loss_scale == 1.0:
        reached = [other for other in others if other.may_scale and any(_reached(other, record))]
        yield
        for other in reached:  # its marks stay: the gradients are true ones
            other.ledger.scale_of_other = 1.0
        return
    own = [param for peer in peers for param in _mxnet.parameters_of(peer)]
    of_others = [(other, list(_reached(other, record))) for other in others]
    # From here on a fresh mark shows a backward without the loss scale.
    before = _mxnet.fresh_weights(own, clear=True)
    if factors:
        _warn_of_reads(peers, own)
    try:
        yield
    finally:
        written = _mxnet.fresh_weights(own, clear=True)
        scaled = not factors or any(map(_mxnet.is_fresh, factors))
        if scaled:
            for peer in peers:
                peer.ledger.note_written((array, grad) for _, array, grad in written)
            for other, params in of_others:
                _mxnet.fresh_weights(params, clear=True)  # at this scale, which is not their trainer's
                if params:
                    other.ledger.scale_of_other = trainer.loss_scale
        names = {id(array) for _, array, _ in written} if scaled else ()
        mark_fresh(array for _, array, _ in [*before, *([] if scaled else written)] if id(array) not in names)
        if factors:
            noted = {id(p) for peer in peers for p in own if _has_written(p, peer.ledger)}
            stop_warning(param for param in own if id(param) not in noted)
        _warn_of_reads(peers, [param for param, *_ in written] if scaled else ())
    if not scaled and written:
        for peer in peers:
            peer.ledger.clear()
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
        refuse_late_scale(record, scale)
        if not HEAD_OPERATORS.isdisjoint(record.operators) or not record.calls.keys() <= converted_calls.keys():
            from .unconverted_heads import refuse_hidden_heads, refuse_unscaled_heads

            refuse_unscaled_heads(record, scale)
            trained = [p for peer in peers for p in _mxnet.parameters_of(peer) if p.grad_req != "null"]
            refuse_hidden_heads(record, scale, (array for param in trained for array in _mxnet.arrays(param)))
    for other in others:
        for param in _reached(other, record) if other.ledger.pending else ():
            raise RuntimeError(
                f"this backward reaches {param.name!r}, whose gradient another mxmp.Trainer has scaled and not "
                "applied: step that trainer first, or give both the same scaler object "
                "(scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for both"
            )
    for peer in peers:
        peer.ledger.check(Event.BACKWARD, scale)
        if scale != 1.0:
            refuse_unscaled_gradients(read_gradients(list(_added_to(peer)), peer.ledger), scale)
    for peer in peers:
        if not peer.ledger.pending:
            sums = (grad for param in _added_to(peer) for _, grad in _mxnet.with_gradients(param))
            peer.scaled_step.continue_sums(sums)
        peer.scaled_step.losses += [loss.detach() for loss in record.losses]
        peer.ledger.note(Event.BACKWARD, scale)
        peer.watch_statistics()
    trainer.scaled_step.group.note_backward(peer.scaled_step for peer in peers)


def _added_to(trainer: Any) -> Iterator[Parameter]:
    """Yield the trainer's parameters to whose gradients a backward adds."""
    return (param for param in _mxnet.parameters_of(trainer) if param.grad_req == "add")


def discard_unused(trainer: Any, record: Record) -> None:
    """Before a backward of ``record``: discard gradients that the user has set to zero, and those with an overflow that
    no step has applied and the backward overwrites, so that the loss scale falls in a loop that never steps."""
    if trainer.scaler_group is None or not any(member.ledger.pending for member in trainer.scaler_group.members):
        return
    with engine_lock():
        waiting = [peer for peer in _peers(trainer, record)[0] if peer.ledger.pending]
        for peer in waiting:
            if peer.ledger.refuses_backward:
                peer.discard_zeros()
        scaled = [peer for peer in waiting if peer.ledger.scaled and peer.loss_scale != 1.0]
        if all(_overwrites(record, peer) for peer in scaled) and any(peer.has_overflow() for peer in scaled):
            for peer in scaled:
                peer.discard()


def _peers(trainer: Any, record: Record) -> tuple[list[Any], list[Any]]:
    """Return the trainers that a backward of ``record`` serves, ``trainer`` first, and those with other scalers."""
    group = trainer.scaler_group
    others = [other for other in list(living_trainers) if other is not trainer]
    sharing = [other for other in others if group is not None and other.scaler_group is group]
    # A trainer of the group that has a loss of its own, as in a GAN, and that this backward does not reach, is no peer.
    peers = [trainer, *(other for other in sharing if any(_reached(other, record)))]
    return peers, [other for other in others if other not in sharing]


def _overwrites(record: Record, trainer: Any) -> bool:
    """Return whether a backward of ``record`` overwrites all gradients that ``trainer`` has not applied."""
    params = [param for param in _mxnet.parameters_of(trainer) if is_written(param, trainer.ledger)]
    return all(
        param.grad_req == "write"
        and (not trainer.ledger.has_written(array, grad) or _mxnet.recorded_name(array) in record.leaves)
        for param in params
        for array, grad in _mxnet.gradients_so_far(param)
    )


def _reached(trainer: Any, record: Record) -> Iterator[Parameter]:
    """Yield the trainer's parameters whose gradients a backward from the losses of ``record`` would write."""
    return (param for param in _mxnet.parameters_of(trainer) if _is_reached(param, record))


def _is_reached(param: Parameter, record: Record) -> bool:
    arrays = _mxnet.arrays(param) if param.grad_req != "null" else ()
    return any(_mxnet.recorded_name(array) in record.leaves for array in arrays)


# The names of running statistics in MXNet's norm layers, for nets that have no graph of mxmp's.
_RUNNING = ("running_mean", "running_var")


def running_statistics_of(params: Sequence[Parameter], since: int) -> list[Gradient]:
    """Return the running statistics that a trainer's next backward may overwrite: a (name, array) for each device.
    They are those among ``params``, and the aux states of each net that has one of ``params``, or that began a training
    forward after the number ``since`` (``next_forward_number``)."""
    # A backward may run through a net that another trainer updates: a GAN generator's runs through the discriminator.
    found = {id(p): p for p in params if not _mxnet.is_differentiable(p) and p.name.endswith(_RUNNING)}
    for conversion in dict.fromkeys([*conversions_of(params), *trained_since(since)]):
        found.update((id(p), p) for p in conversion.statistics.values())
    return [Gradient(p.name, array) for p in found.values() for array in _mxnet.arrays(p)]


# -- what a backward starts from --------------------------------------------------------------------

# How many binary digits a number of these dtypes has.
_NARROW = {np.dtype(np.float16): ("float16", 11), BFLOAT16: ("bfloat16", 8)}


def check_head_gradient(loss: NDArray, scale: float, given: NDArray | None = None) -> None:
    """Raise ``TypeError`` if one of them is no NDArray, and ``ValueError`` if the dtype of the loss cannot hold
    ``scale`` exactly, or ``given`` does not fit the loss."""
    if not isinstance(loss, NDArray):
        raise TypeError(f"loss must be an NDArray or a list of them, got {type(loss).__name__}")
    name, digits = _NARROW.get(np.dtype(loss.dtype), ("", 53))
    if (name == "float16" and not 2.0**-14 <= scale <= 2.0**15) or not (
        math.frexp(scale)[0] * 2.0**digits
    ).is_integer():
        # The update divides by the exact scale.
        raise ValueError(
            f"the loss is {name}, which cannot hold the loss scale {scale:g}: compute the loss in FP32 "
            "(loss_fn(net(x).astype('float32'), y)), or use a power of two from 2**-14 to 2**15"
        )
    if given is None:
        return
    if not isinstance(given, NDArray):
        raise TypeError(f"out_grad must be an NDArray or a list of them, got {type(given).__name__}")
    wanted, got = ((each.shape, dtype_name(each.dtype), str(each.ctx)) for each in (loss, given))
    if wanted != got:
        raise ValueError(f"out_grad must have the shape, dtype and device of its loss, {wanted}, got {got}")


def head_gradient(loss: NDArray, scale: float, given: NDArray | None = None) -> NDArray:
    """Return the head gradient with which a backward of ``loss`` is one of ``loss * scale``; does not wait.
    ``given`` is the user's, None for 1. Raises as ``check_head_gradient``."""
    check_head_gradient(loss, scale, given)
    kind = mx.np if isinstance(loss, mx.np.ndarray) else mx.nd
    return (kind.ones_like(loss) if given is None else given) * scale


# -- the gradients that are there -------------------------------------------------------------------


class Gradients(NamedTuple):
    """The gradients of a trainer's parameters, by what has written them since the last step."""

    due: list[Update]  # any backward, for the step to apply
    fresh: list[Update]  # of these, those that still have MXNet's mark: no scaled backward
    stale: list[Update]  # none


def read_gradients(params: Sequence[Parameter], ledger: Ledger) -> Gradients:
    """Return the gradients of ``params``; ``Update.index`` is a position in ``params``."""
    found = Gradients([], [], [])
    for index, param in enumerate(params):
        masters = param.held_masters if isinstance(param, LowParameter) else None
        for device, (weight, grad) in enumerate(_mxnet.with_gradients(param)):
            update = Update(index, device, param.name, weight, grad, masters)
            is_fresh = _mxnet.is_fresh(weight)
            (found.due if is_fresh or ledger.has_written(weight, grad) else found.stale).append(update)
            if is_fresh:
                found.fresh.append(update)
    return found


def refuse_stale(found: Gradients, ledger: Ledger) -> None:
    """Raise ``UserWarning`` for a stale gradient, as ``gluon.Trainer`` does."""
    if found.stale:
        what = (
            "If only a part of the net was used on purpose, call step with ignore_stale_grad=True"
            if found.due
            else "The array that a backward has written is not its gradient any more, as grad_req, reset_ctx or "
            "initialize has made a new one: call backward again"
            if id(found.stale[0].weight) in ledger.written
            else "Another mxmp.Trainer's backward has written it, with a loss scale: give both the same scaler object"
            if ledger.scale_of_other is not None
            else "Nor has any other gradient of this trainer: the loss reaches none of its parameters. Was it computed "
            "by another net? A trainer is made over the parameters of the net that it trains, net.collect_params()"
        )
        raise UserWarning(
            f"Gradient of Parameter `{found.stale[0].name}` on context {found.stale[0].weight.context} has not been "
            f"updated by backward since last `step`. {what}"
        )


def zero_stale(found: Gradients) -> None:
    """Set a gradient on a device to zero if only other devices have written theirs since the last step."""
    # The batch on some devices left out a part of the net; the sum over devices would contain their old gradients.
    written = {update.index for update in found.due}
    for update in found.stale:
        if update.index in written:
            update.grad[:] = 0


def release(trainer: Any, updates: Iterable[Update]) -> None:
    """Let the scaler not wait for trainers all of whose gradients are in ``updates``, which ``trainer`` applies."""
    # Such as the trainer of an earlier phase, of the same parameters: it never steps, and the scale would stand still.
    others = [each for each in list(living_trainers) if each is not trainer and each.ledger.awaited]
    others = [each for each in others if each.scaler_group is trainer.scaler_group]
    weights = {id(update.weight) for update in updates} if others else set()
    for other in others:
        pairs = (pair for param in _mxnet.parameters_of(other) for pair in _mxnet.gradients_so_far(param))
        # At a loss scale of 1 the ledger has no weights, and MXNet's marks stay.
        due = (pair[0] for pair in pairs if other.ledger.has_written(*pair) or _mxnet.is_fresh(pair[0]))
        if all(id(weight) in weights for weight in due):
            other.ledger.clear()


def use_up(params: Sequence[Parameter], found: Gradients) -> None:
    """Mark the gradients that are due (``index`` is into ``params``) as used up: no later step applies them."""
    _clear_marks(found)
    weights = {id(update.weight) for update in found.due}
    for trainer in list(living_trainers):  # several may have one parameter
        trainer.ledger.use_up(weights)
    stop_warning(params[index] for index in {update.index for update in found.due})


def _clear_marks(found: Gradients) -> None:
    for update in found.fresh:
        _mxnet.set_fresh(update.weight, fresh=False)
    found.fresh.clear()


def mark_fresh(weights: Iterable[NDArray]) -> None:
    for array in weights:
        _mxnet.set_fresh(array, fresh=True)


def note_fresh(found: Gradients, ledger: Ledger) -> None:
    """Note in the ledger what a backward at a loss scale of 1 has written; remove the marks, to see the next one."""
    ledger.note_written((update.weight, update.grad) for update in found.fresh)
    _clear_marks(found)


def is_written(param: Parameter, ledger: Ledger) -> bool:
    return any(map(_mxnet.is_fresh, _mxnet.arrays(param))) or _has_written(param, ledger)


def _has_written(param: Parameter, ledger: Ledger) -> bool:
    return any(ledger.has_written(*pair) for pair in _mxnet.gradients_so_far(param))


def refuse_unscaled_gradients(found: Gradients, loss_scale: float) -> None:
    """Raise ``RuntimeError`` if a backward without the loss scale wrote a gradient that is not all zeros.
    Waits for the device only if there was such a backward."""
    for update in found.fresh:
        if update.grad.asnumpy().any():
            raise RuntimeError(
                f"a plain backward has written the gradient of {update.name!r} on {update.weight.context}, and the "
                f"update would divide it by the loss scale {loss_scale:g}, as it does with those of trainer.backward: "
                "use trainer.backward(loss) for every loss of the step (several add up with grad_req='add'; with "
                "scale_loss, call backward in the block), or autograd.grad for gradients that are no part of it"
            )
