"""The flag ``static_shape`` of hybridize, kept for calls that autograd records where MXNet's gradients are right.

With it, MXNet's backward goes on writing into the arrays that it wrote first, and adds where it added first. They are
the weights' gradients only if nothing else of a record reads a weight; otherwise MXNet sums from arrays of its own,
which in a later backward get what the gradients should. So a call whose backward was not seen to be by
``trainer.backward``, of a record without a second call and without a penalty on the weights, is the last with the flag.
``autograd.grad``, ``loss.backward()`` and a backward within ``trainer.scale_loss`` are not seen. A call that is left
without a backward, as a GAN's generator is, does no harm; while it may still get one, calls go without the flag.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from . import _mxnet

if TYPE_CHECKING:
    from .record import Record


class RecordedCalls:
    """Runs the calls of one thread that autograd records, through a CachedOp."""

    def __init__(self, make: Callable[[list], mx.nd.CachedOp], flags: list) -> None:
        self._make, self._flags = make, flags
        self._has_flag = bool(dict(flags).get("static_shape"))
        self._op = make(flags)
        self._beside: mx.nd.CachedOp | None = None  # without the flag
        # On each device, with the flag: the arrays and the record of the last call, and whether its backward was seen.
        self._marks: dict[mx.Context, _mxnet.Marks] = {}
        self._last: dict[mx.Context, _mxnet.Recorded] = {}
        self._seen: set[mx.Context] = set()
        self._sizes: dict[mx.Context, tuple[int, ...]] = {}

    def run(self, values: Sequence[NDArray], weights: Sequence[NDArray]) -> Any:
        """Run it on ``values``; ``weights`` are those of them that ``static_shape`` remembers."""
        if not weights or not self._has_flag:
            return self._op(*values)
        ctx = mx.current_context()
        if ctx in self._marks and not self._marks[ctx].hold(weights):
            self._renew(self._make(self._flags))
        if ctx not in self._marks:
            self._marks[ctx] = _mxnet.Marks(weights)
        if self._is_used_up_unseen(ctx):
            self._has_flag = False
            self._renew(self._without_flag())
            return self._op(*values)
        if ctx in self._last and self._last[ctx].is_waiting() and self._last[ctx].is_held():
            return self._without_flag()(*values)
        self._last.pop(ctx, None)  # so that the call can have its memory
        out = self._op(*values)
        self._last[ctx] = _mxnet.Recorded(out if isinstance(out, NDArray) else out[0])
        self._seen.discard(ctx)
        _waiting.add(self)
        return out

    def _is_used_up_unseen(self, ctx: mx.Context) -> bool:
        return ctx in self._last and ctx not in self._seen and not self._last[ctx].is_waiting()

    def _without_flag(self) -> mx.nd.CachedOp:
        if self._beside is None:
            self._beside = self._make([flag for flag in self._flags if flag[0] != "static_shape"])
        return self._beside

    def in_record(self, record: Record) -> list[mx.Context]:
        """Return on which devices a backward of ``record``, if it uses the last call up, writes the gradients alone."""
        found = []
        for ctx, last in self._last.items():
            if not last.is_waiting():
                continue
            # A second reader of a weight makes a record larger, so one of the same size is not searched again.
            if self._sizes.get(ctx) != record.sizes:
                call = {last.name}
                if any(record.readers.get(name or "") != call for name in self._marks[ctx].names):
                    continue
                self._sizes[ctx] = record.sizes
            found.append(ctx)
        return found

    def note_backward(self, contexts: Iterable[mx.Context]) -> None:
        """Note what a backward has used up of the ``contexts`` of ``in_record``."""
        self._seen.update(ctx for ctx in contexts if ctx in self._last and not self._last[ctx].is_waiting())
        if self._seen.issuperset(self._last):
            _waiting.discard(self)

    def _renew(self, op: mx.nd.CachedOp) -> None:
        self._op = op
        _waiting.discard(self)
        for kept in (self._marks, self._last, self._seen, self._sizes):
            kept.clear()


# Global: those whose last call, with the flag, no backward was seen of; nothing leads from a loss to them.
_waiting: weakref.WeakSet[RecordedCalls] = weakref.WeakSet()


@contextmanager
def seen(record: Record) -> Iterator[None]:
    """Let the flag stay for nets whose weights nothing else of ``record`` reads; the block runs a backward of it."""
    found = [(calls, calls.in_record(record)) for calls in list(_waiting)]
    yield
    for calls, contexts in found:
        calls.note_backward(contexts)
