"""The flag ``static_shape`` of hybridize, kept for calls that autograd records where MXNet's gradients are right.

With it, MXNet's backward goes on writing into the arrays that it wrote first. They are the weights' gradients only if
nothing else of the record reads a weight; otherwise MXNet sums from arrays of its own, which in a later backward get
what the gradients should. So the flag is dropped unless a Trainer's first backward is seen to be of the first kind, and
where a record has two calls, for each of which MXNet remembers arrays of its own.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from . import _mxnet
from .record import Record


class RecordedCalls:
    """Runs the calls of one thread that autograd records, through a CachedOp."""

    def __init__(self, make: Callable[[list], mx.nd.CachedOp], flags: list) -> None:
        self._make, self._flags = make, flags
        self._op = make(flags)
        # On each device, with ``static_shape``: the arrays and the record of the last call; and whether it may stay.
        self._marks: dict[mx.Context, _mxnet.Marks] = {}
        self._last: dict[mx.Context, _mxnet.Recorded] = {}
        self._proved: set[mx.Context] = set()

    def run(self, values: Sequence[NDArray], weights: Sequence[NDArray]) -> Any:
        """Run it on ``values``; ``weights`` are those of them that ``static_shape`` remembers."""
        if not weights or not dict(self._flags).get("static_shape"):
            return self._op(*values)
        ctx = mx.current_context()
        last = self._last.pop(ctx, None)
        if ctx in self._marks and not self._marks[ctx].hold(weights):
            self._renew()
        elif last is not None and (ctx not in self._proved or last.is_waiting()):
            self._flags = [flag for flag in self._flags if flag[0] != "static_shape"]
            self._renew()
            return self._op(*values)
        if ctx not in self._marks:
            self._marks[ctx] = _mxnet.Marks(weights)
            _unproved.add(self)
        out = self._op(*values)
        self._last[ctx] = _mxnet.Recorded(out if isinstance(out, NDArray) else out[0])
        return out

    def prove(self, record: Record) -> None:
        """Note on which devices the call is all that reads its weights in ``record``."""
        for ctx, last in self._last.items():
            if all(record.readers.get(name or "") == {last.name} for name in self._marks[ctx].names()):
                self._proved.add(ctx)
        if self._proved.issuperset(self._marks):
            _unproved.discard(self)

    def _renew(self) -> None:
        self._op = self._make(self._flags)
        _unproved.discard(self)
        for kept in (self._marks, self._last, self._proved):
            kept.clear()


# Global: whose first backward with ``static_shape`` is still to come; nothing leads from a loss to them.
_unproved: weakref.WeakSet[RecordedCalls] = weakref.WeakSet()


def note_backward(record: Record) -> None:
    """Let the flag stay for nets whose weights nothing else of ``record`` reads; a backward of it comes next."""
    for recording in list(_unproved):
        recording.prove(record)
