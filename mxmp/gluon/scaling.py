"""The scale of each loss head that a backward reaches, and what a forward remembers for it.

A loss head is an operator that writes its own gradient, such as ``SoftmaxOutput``. In a converted block it reads its
scale from an input, an array of each recorded forward. Outside, one that reads its attribute ``grad_scale`` in the
backward is scaled by that; any other ignores the loss scale, and is refused (``unconverted_heads.py``).
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..step.python_operators import true_gradients
from . import _mxnet

if TYPE_CHECKING:
    from .record import Record


def _as_text(number: np.float32) -> str:
    """Return a number as MXNet reads it exactly: its parser misreads some exponents."""
    return np.format_float_positional(number, unique=True, trim="-")


# Global: the scale arrays that recorded forwards read, by the names that autograd gave them; autograd's record is no
# object of Python's that could hold them. Each is a pair: the array that the forward was given, by which autograd knows
# it, and one of the same memory to write to. They are dropped when a scaled backward has used their record up, and the
# oldest in any case.
_scales: dict[str, tuple[NDArray, NDArray]] = {}
# Global, for the same reason: the names of the nodes that recorded forwards of converted blocks made; and of these,
# the forwards with loss heads that the loss scale does not multiply.
converted_calls: dict[str, None] = {}
_unscaled_calls: dict[str, None] = {}
_LIVE_RECORDS = 1 << 14
# Global: all trainers that live. A backward must know of trainers with other scalers whose gradients it would
# overwrite, and a forward whether any trainer scales; no object leads from a loss or a net to them.
living_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
# Global: the lock for these three dicts.
_lock = threading.Lock()
# Global: whether this thread is inside a scaled backward, of whatever trainer.
_local = threading.local()


def needs_scale(compute: str) -> bool:
    """Return whether the loss heads of a converted block must multiply their gradients by the scale in this call."""
    # In bfloat16 without a trainer that scales, the multiplication would be needless and slow: it takes ten operators.
    return autograd.is_recording() and (
        compute != "bfloat16" or any(trainer.may_scale for trainer in list(living_trainers))
    )


def call_with_scale(call: Callable[[NDArray], Any], ctx: mx.Context) -> Any:
    """Call ``call(scale)``, a forward with loss heads, with an array of 1 that ``heads_scaled_by`` sets later."""
    memory = mx.nd.ones((1,), ctx=ctx)
    fed = memory.detach()  # autograd notes in the handle which record it belongs to
    out = call(fed)
    if autograd.is_recording():
        _remember(_scales, fed, (fed, memory))
    return out


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """Multiply the gradients that loss heads and Python operators write by ``value``, in a backward of ``record``.
    Raises ``RuntimeError`` inside another such ``with`` block on this thread: the loss would be scaled twice."""
    if getattr(_local, "open", False):
        raise RuntimeError(
            "a scaled backward inside scale_loss would be scaled twice: call autograd.backward there, on the "
            "scaled loss, or trainer.backward(loss) outside"
        )
    reached: dict[str, tuple[NDArray, NDArray]] = {}
    if _scales:
        with _lock:
            reached = {name: _scales[name] for name in record.leaves if name in _scales}
    scales = [memory for _, memory in reached.values()] if value != 1.0 else []
    heads = record.heads_with_attribute() if value != 1.0 else []
    _local.open = True
    try:
        # MXNet's engine orders these writes and the backward's reads, so nothing waits.
        _set(scales, value)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", _as_text(np.float32(own) * np.float32(value)))
        with true_gradients(value):
            yield
    finally:
        _set(scales, 1.0)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", own)
        _local.open = False
        used_up = [name for name, (fed, _) in reached.items() if _mxnet.recorded_name(fed) is None]
        with _lock:
            for name in used_up:
                _scales.pop(name, None)


def remember_converted_call(out: NDArray, *, has_unscaled_heads: bool) -> None:
    """Remember, by one of its outputs, a call of a converted block, for ``unconverted_heads`` to ignore.
    For ``refuse_late_scale``, also that it has loss heads which the loss scale does not multiply."""
    _remember(converted_calls, out, None)
    if has_unscaled_heads:
        _remember(_unscaled_calls, out, None)


def refuse_late_scale(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if a forward of ``record`` has loss heads that the loss scale ``scale`` would not multiply.
    It is then one in bfloat16, of a time when no mxmp.Trainer had a loss scale."""
    if _unscaled_calls and any(node.name in _unscaled_calls for node in record.nodes()):
        raise ValueError(
            f"the net, in bfloat16, ran before there was a loss scale; it is {scale:g} now. The gradient of the net's "
            "loss head would not be multiplied by it, and the update would divide by it: call the net again"
        )


def _remember(store: dict, array: NDArray, value: Any) -> None:
    """Store ``value`` under the name that autograd gave to ``array``; do nothing if it was not recorded."""
    name = _mxnet.recorded_name(array)
    if name is not None:
        with _lock:
            store[name] = value
            # Forwards without a backward must not fill the memory.
            while len(store) > _LIVE_RECORDS:
                del store[next(iter(store))]


def _set(scales: Sequence[NDArray], value: float) -> None:
    with autograd.pause():
        for scale in scales:
            scale[:] = value
