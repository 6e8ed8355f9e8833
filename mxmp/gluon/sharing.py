"""Trainers that meet in one loss: they share one scaler object, or no backward reaches both.

Gradients of two losses at two scales in one buffer would be updates that nobody asked for.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..step.phase import Event, Phase, Progress
from . import _mxnet
from . import fresh_gradients as fresh
from .record import Record, recorded_name
from .unscaled import refuse_hidden_heads, refuse_unscaled_heads

__all__ = ["join", "scaled_backward"]

# Global: all trainers that live. A backward must know of trainers with other scalers whose gradients it would
# overwrite, and no object leads from a loss to them.
_trainers: weakref.WeakSet[Any] = weakref.WeakSet()


def join(trainer: Any) -> None:
    """Let other trainers know of this one, for as long as it lives."""
    _trainers.add(trainer)


@contextmanager
def scaled_backward(trainer: Any, record: Record, factors: Sequence[NDArray] = ()) -> Iterator[None]:
    """The one backward in this block is scaled, and serves all trainers that were given the same scaler object.

    ``factors``: what the losses were multiplied by, arrays with a gradient each, where the user calls backward.
    They tell a backward of the scaled losses from one of others; it may also come after the block.

    Raises
    ------
    ValueError
        A loss head that the scale would not reach.
    RuntimeError
        One of the trainers has looked at its gradients and not stepped, or the backward would write gradients
        that a trainer with another scaler has yet to apply, or add to those of a plain backward. No gradient has
        been written. Or the backward was not of the scaled losses: ``step`` will refuse its gradients.
    """
    peers, others = _peers(trainer)
    _begin(trainer, peers, others, record)
    if trainer.loss_scale == 1.0:
        yield
        return
    own = [param for peer in peers for param in _mxnet.parameters_of(peer)]
    foreign = [param for other in others for param in _mxnet.parameters_of(other) if _is_reached(param, record)]
    before = fresh.take(own)
    try:
        yield
    finally:
        reached = fresh.take(own)
        scaled = not factors or any(map(_mxnet.is_fresh, factors))
        if scaled:
            fresh.claim(reached)
            fresh.take(foreign)  # at this scale, which is not their trainer's
            written = {id(array) for _, array in reached}
            fresh.put_back((param, array) for param, array in before if id(array) not in written)
        else:
            fresh.put_back([*before, *reached])
    if not scaled and reached:
        for peer in peers:
            peer.progress = Progress()
        raise RuntimeError(
            "a backward within scale_loss was not of the scaled loss, so its gradients are not scaled, and the update "
            f"would divide them by {trainer.loss_scale:g}: with trainer.scale_loss(loss) as scaled: scaled.backward()"
        )
    for peer in peers if not scaled else ():
        peer.progress.factors += factors


def _peers(trainer: Any) -> tuple[list[Any], list[Any]]:
    """Those that a backward of ``trainer`` serves, itself first, and all others."""
    group = trainer.scaler_group
    others = [t for t in list(_trainers) if t is not trainer]
    peers = [trainer, *(t for t in others if group is not None and t.scaler_group is group)]
    return peers, [t for t in others if t not in peers]


def _begin(trainer: Any, peers: Sequence[Any], others: Sequence[Any], record: Record) -> None:
    if trainer.loss_scale != 1.0:
        refuse_unscaled_heads(record, trainer.loss_scale)
        refuse_hidden_heads(record, trainer.loss_scale, _trained_arrays(peers))
    _refuse_overwriting([t for t in others if t.progress.phase is not Phase.READY], record)
    for peer in peers:
        peer.progress.check(Event.BACKWARD, trainer.loss_scale)
        if trainer.loss_scale != 1.0:
            fresh.refuse_plain_gradients(
                [p for p in _mxnet.parameters_of(peer) if p.grad_req == "add"], trainer.loss_scale
            )
    for peer in peers:
        peer.progress.note(Event.BACKWARD, trainer.loss_scale)
        peer.watch_statistics()
    trainer.scaled_step.group.note_backward()


def _trained_arrays(trainers: Sequence[Any]) -> Iterator[NDArray]:
    for trainer in trainers:
        for param in _mxnet.parameters_of(trainer):
            yield from _mxnet.arrays(param) if param.grad_req != "null" else ()


def _is_reached(param: Parameter, record: Record) -> bool:
    """Whether a backward from the record writes the parameter's gradient."""
    if param.grad_req == "null":
        return False
    return any(recorded_name(array) in record.leaves for array in _mxnet.arrays(param))


def _refuse_overwriting(waiting: Sequence[Any], record: Record) -> None:
    """Costs nothing while no other trainer stands between a backward and its step."""
    for param in (param for trainer in waiting for param in _mxnet.parameters_of(trainer)):
        if _is_reached(param, record):
            raise RuntimeError(
                f"this backward reaches {param.name!r}, whose gradient another mxmp.Trainer has scaled and not "
                "applied: step that trainer first, or give both the same scaler object "
                "(scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for both"
            )
