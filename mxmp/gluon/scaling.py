"""The loss scale of a backward: what the backward starts from, and the scale of each loss head that it reaches.

Each recorded forward of a converted block feeds an array of its own to ``SCALE_NAME``. It is the loss scale in a scaled
backward that reaches this forward, and 1 otherwise.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .record import Record, recorded_name

__all__ = ["call_with_scale", "head_gradient", "heads_scaled_by", "is_converted", "note_call"]


def head_gradient(loss: NDArray, scale: float) -> NDArray:
    """Return what backward of ``loss * scale`` starts from, in the loss's dtype, shape and kind of array.

    Raises
    ------
    TypeError
        ``loss`` is no NDArray.
    ValueError
        ``loss`` is float16, which cannot hold the scale.
    """
    if not isinstance(loss, NDArray):
        raise TypeError(f"loss must be an NDArray or a list of them, got {type(loss).__name__}")
    if loss.dtype == np.float16 and scale > 2.0**15:
        raise ValueError(
            f"the loss is float16, which cannot hold the loss scale {scale:g}: compute the loss in FP32 "
            "(loss_fn(net(x).astype('float32'), y))"
        )
    kind = mx.np if isinstance(loss, mx.np.ndarray) else mx.nd
    return kind.ones_like(loss) * scale


# Global: the scale arrays that recorded forwards read, by the names that autograd gave them, as a record is no object
# of Python's. The oldest that no backward reached fall out.
_recorded: dict[str, NDArray] = {}
# Global, likewise: the nodes that recorded forwards of converted blocks made, by name.
_calls: dict[str, None] = {}
_LIVE_RECORDS = 1 << 14
# Global: for these two.
_lock = threading.Lock()
# Global: whether this thread is inside a scaled backward, of whatever trainer.
_local = threading.local()


def call_with_scale(call: Callable[[NDArray], Any], ctx: mx.Context) -> Any:
    """Return ``call(scale)``, which feeds ``scale`` to ``SCALE_NAME``: FP32, shape (1,), 1 but in a scaled backward."""
    memory = mx.nd.ones((1,), ctx=ctx)
    fed = memory.detach()  # autograd notes in the handle which record it belongs to
    out = call(fed)
    if autograd.is_recording():
        try:
            name = mx.autograd.get_symbol(fed).name
        except mx.MXNetError:  # nothing here needs a gradient, so nothing was recorded
            return out
        _remember(_recorded, name, memory)
    return out


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """Multiply the gradients of heads by ``value`` in a backward from ``record``'s losses within this block.

    The record says which forwards the backward reaches, whoever owns their parameters, and each has a scale of its
    own; other backwards are not scaled. MXNet's engine orders the writes before and after among the reads of the
    backward between them; nothing synchronizes. Raises ``RuntimeError`` inside another such block of this thread.
    """
    if getattr(_local, "open", False):
        raise RuntimeError(
            "a scaled backward inside scale_loss would be scaled twice: call autograd.backward there, on the "
            "scaled loss, or trainer.backward(loss) outside"
        )
    reached = _reached(record) if _recorded and value != 1.0 else []
    _local.open = True
    try:
        _set(reached, value)
        yield
    finally:
        _set(reached, 1.0)
        _local.open = False


def note_call(out: NDArray) -> None:
    """Remember that a converted block has returned ``out``, if it is recorded: all heads in the block are scaled."""
    name = recorded_name(out)
    if name is not None:
        _remember(_calls, name, None)


def is_converted(node: str) -> bool:
    """Return whether a recorded node is a call of a converted block, in which every loss head is scaled."""
    with _lock:
        return node in _calls


def _remember(store: dict, name: str, value: Any) -> None:
    with _lock:
        store[name] = value
        while len(store) > _LIVE_RECORDS:
            del store[next(iter(store))]


def _reached(record: Record) -> list[NDArray]:
    with _lock:
        return [_recorded[name] for name in record.leaves if name in _recorded]


def _set(scales: Sequence[NDArray], value: float) -> None:
    with autograd.pause():
        for scale in scales:
            scale[:] = value
