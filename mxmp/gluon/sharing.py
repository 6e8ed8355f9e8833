"""Trainers that meet in one loss: they share one scaler object, or no backward reaches both.

Gradients of two losses at two scales in one buffer would be updates that nobody asked for.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterator, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..precision.heads import refuse_unscaled_heads
from ..precision.hidden_heads import refuse_hidden_heads
from ..precision.record import Record
from ..step.phase import Event, Phase
from . import _mxnet

__all__ = ["begin_backward", "join"]

_trainers: weakref.WeakSet[Any] = weakref.WeakSet()


def join(trainer: Any) -> None:
    """Let other trainers know of this one, for as long as it lives."""
    _trainers.add(trainer)


def begin_backward(trainer: Any, record: Record) -> None:
    """Tell every trainer that this backward serves: all that were given the same scaler object.

    Raises
    ------
    ValueError
        A loss head that the scale would not reach.
    RuntimeError
        One of them has looked at its gradients and not stepped, or the backward would write gradients
        that a trainer with another scaler has yet to apply. No gradient has been written.
    """
    step = trainer._step
    others = [t for t in list(_trainers) if t is not trainer]
    peers = [trainer, *(t for t in others if step and t._step and t._step.group is step.group)]
    if trainer.loss_scale != 1.0:
        refuse_unscaled_heads(record, trainer.loss_scale)
        refuse_hidden_heads(record, trainer.loss_scale, _trained_arrays(peers))
    _refuse_overwriting([t for t in others if t not in peers and t._progress.phase is not Phase.READY], record)
    for peer in peers:
        peer._progress.check(Event.BACKWARD, trainer.loss_scale)
    for peer in peers:
        peer._progress.note(Event.BACKWARD, trainer.loss_scale)
        peer._watch_statistics()
    trainer._state.group.note_backward()


def _trained_arrays(trainers: Sequence[Any]) -> Iterator[NDArray]:
    for trainer in trainers:
        for param in trainer._params:
            yield from (array for array, _ in _mxnet.with_gradients(param))


def _refuse_overwriting(waiting: Sequence[Any], record: Record) -> None:
    """Costs nothing while no other trainer stands between a backward and its step."""
    if not waiting:
        return
    trained = [param for trainer in waiting for param in trainer._params if param.grad_req != "null"]
    for param in trained:
        if any(mx.autograd.get_symbol(array).name in record.leaves for array in _mxnet.arrays(param)):
            raise RuntimeError(
                f"this backward reaches {param.name!r}, whose gradient another mxmp.Trainer has scaled and not "
                "applied: step that trainer first, or give both the same scaler object "
                "(scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for both"
            )
