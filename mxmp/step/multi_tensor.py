"""One operator for many arrays. Where MXNet has none, an SGD step of a fixed size does the same.

Each operator is a launch on a GPU. No function here waits for a device, and all arrays of a call are on one device.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

__all__ = ["FlatCopies", "copy_all", "round_all", "subtract_all", "widen_all"]

# The number of weights that one kernel takes (MultiSGDKernelParam in MXNet's optimizer_op-inl.h).
_KERNEL_LIMIT = 60


class FlatCopies(NamedTuple):
    """Room for copies of many arrays on one device: ``each`` is a part of the vector ``flat``."""

    flat: NDArray
    each: list[NDArray]

    @classmethod
    def like(cls, arrays: Sequence[NDArray], flat: NDArray | None = None) -> FlatCopies:
        """Return room for copies of ``arrays``: in FP32, not initialized, or in ``flat``, a vector of their sizes."""
        ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        flat = mx.nd.empty(ends[-1], arrays[0].ctx) if flat is None else flat
        return cls(flat, [flat[a:b].reshape(array.shape) for array, a, b in zip(arrays, ends, ends[1:])])


def copy_all(arrays: Sequence[NDArray], copies: Sequence[NDArray], after: Sequence[NDArray] = ()) -> None:
    """Copy FP32 arrays into ``copies`` once the arrays ``after`` are computed. What is not finite becomes NaN."""
    unread = [mx.nd.empty(array.shape, array.ctx) for array in after]
    for some in _portions(list(zip(arrays, copies)), _KERNEL_LIMIT - len(after)):
        read, out = [*(array for array, _ in some), *after], [*(copy for _, copy in some), *unread]
        _sgd([(array, array) for array in read], out, rate=0.0)


def subtract_all(arrays: Sequence[NDArray], others: Sequence[NDArray]) -> None:
    """Subtract from each array another of its dtype, in place. What is not finite becomes NaN."""
    for some in _portions(list(zip(arrays, others))):
        _sgd(some, [array for array, _ in some], rate=1.0)


def widen_all(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Return FP32 copies of finite float16 arrays."""
    full: list[NDArray] = []
    for some in _portions(arrays):
        copies = [mx.nd.empty(array.shape, ctx=array.ctx) for array in some]
        mx.nd.reset_arrays(*copies, num_arrays=len(copies))
        _sgd(zip(some, some, copies), some, rate=-1.0)
        full += copies
    return full


def round_all(triples: Sequence[tuple[NDArray, NDArray, NDArray]]) -> None:
    """Round the first of each (FP32 array, float16 array, finite float16 array) into the second. -0 may become 0."""
    for some in _portions(triples):
        _sgd([(low, finite, full) for full, low, finite in some], [low for _, low, _ in some], rate=0.0)


def _sgd(weights: Iterable[tuple[NDArray, ...]], out: list[NDArray], *, rate: float) -> None:
    """Compute ``out = weight - rate * gradient`` for each (weight, gradient) of one dtype.

    For each (float16 weight, gradient, FP32 weight) compute ``weight32 -= rate * gradient; out = weight32``.
    """
    groups = list(weights)
    update = mx.nd.multi_sgd_update if len(groups[0]) == 2 else mx.nd.multi_mp_sgd_update
    n = len(out)
    update(*(array for group in groups for array in group), out=out, num_weights=n, lrs=[rate] * n, wds=[0.0] * n)


def _portions(items: Sequence[Any], size: int = _KERNEL_LIMIT) -> Iterator[list[Any]]:
    """Yield all items in their order, in lists of at most ``size``."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))
