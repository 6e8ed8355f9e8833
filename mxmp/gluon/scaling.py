"""What a forward remembers for a scaled backward: the scale of each loss head in it, and that mxmp ran it.

A loss head is an operator that writes its own gradient, such as ``SoftmaxOutput``. In a converted block it reads its
scale from an input, an array of each recorded forward. Outside, one that reads its attribute ``grad_scale`` in the
backward is scaled by that; any other ignores the loss scale, and is refused (``unconverted_heads.py``).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

from . import _mxnet

if TYPE_CHECKING:
    from .record import Record

# Global: the scale arrays that recorded forwards read, by the names that autograd gave them; autograd's record is no
# object of Python's that could hold them. Each is a pair: the array that the forward was given, by which autograd knows
# it, and one of the same memory to write to. They are dropped when a scaled backward has used their record up, and the
# oldest in any case.
_scales: dict[str, tuple[NDArray, NDArray]] = {}
# Global, for the same reason: the names of the nodes that recorded forwards of converted blocks made; and of these,
# the forwards with loss heads that the loss scale does not multiply.
converted_calls: dict[str, None] = {}
unscaled_calls: dict[str, None] = {}
_LIVE_RECORDS = 1 << 14
# Global: all trainers that live. A backward must know of trainers with other scalers whose gradients it would
# overwrite, and a forward whether any trainer scales; no object leads from a loss or a net to them.
living_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
# Global: the lock for these three dicts.
_lock = threading.Lock()


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


def scales_in(record: Record) -> dict[str, tuple[NDArray, NDArray]]:
    """Return the scale arrays that the forwards of ``record`` read, as they are in ``_scales``."""
    if not _scales:
        return {}
    with _lock:
        return {name: _scales[name] for name in record.leaves if name in _scales}


def forget_scales(names: Iterable[str]) -> None:
    with _lock:
        for name in names:
            _scales.pop(name, None)


def remember_converted_call(out: NDArray, *, has_unscaled_heads: bool) -> None:
    """Remember, by one of its outputs, a call of a converted block, for ``unconverted_heads`` to ignore.
    For ``refuse_late_scale``, also that it has loss heads which the loss scale does not multiply."""
    _remember(converted_calls, out, None)
    if has_unscaled_heads:
        _remember(unscaled_calls, out, None)


def _remember(store: dict, array: NDArray, value: Any) -> None:
    """Store ``value`` under the name that autograd gave to ``array``; do nothing if it was not recorded."""
    name = _mxnet.recorded_name(array)
    if name is not None:
        with _lock:
            store[name] = value
            # Forwards without a backward must not fill the memory.
            while len(store) > _LIVE_RECORDS:
                del store[next(iter(store))]
