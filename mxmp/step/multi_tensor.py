"""One operator for many arrays of one device, as each operator is a launch on a GPU. No function waits for a device.
Where MXNet has none, an SGD step of a fixed size does the same.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ._mxnet import Prepared
from .gradients import Scalars

# The number of weights that one kernel takes (MultiSGDKernelParam in MXNet's optimizer_op-inl.h).
_KERNEL_LIMIT = 60


class FlatCopies(NamedTuple):
    """Memory for copies of several arrays of one device: one vector, and a view into it per array, in its shape."""

    flat: NDArray
    each: list[NDArray]

    @classmethod
    def like(cls, arrays: Sequence[NDArray], flat: NDArray | None = None) -> FlatCopies:
        """Return views into ``flat``, of any dtype, or into a new FP32 vector, not initialized. Copies no values."""
        ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        flat = mx.nd.empty(ends[-1], arrays[0].ctx) if flat is None else flat
        return cls(flat, [flat[a:b].reshape(array.shape) for array, a, b in zip(arrays, ends, ends[1:])])


def copy_all(arrays: Sequence[NDArray], copies: Sequence[NDArray]) -> None:
    """Copy FP32 arrays into FP32 arrays; in a copy an inf becomes NaN, and -0 becomes 0."""
    for copy in copying(arrays, copies):
        copy()


def copying(arrays: Sequence[NDArray], copies: Sequence[NDArray], after: NDArray | None = None) -> list[Prepared]:
    """Return the operators of ``copy_all``, to call again and again, each time after ``after`` has been written."""
    # Each operator also reads ``after``, so that MXNet's engine starts the copies only after this array is computed.
    unused = [] if after is None else [(after, mx.nd.empty(after.shape, after.ctx))]
    parts = ([*some, *unused] for some in chunks(list(zip(arrays, copies)), _KERNEL_LIMIT - len(unused)))
    return [_sgd([(array, array) for array, _ in pairs], [copy for _, copy in pairs], rate=0.0) for pairs in parts]


def subtract_all(arrays: Sequence[NDArray], others: Sequence[NDArray]) -> None:
    """Compute ``array -= other`` for pairs of one dtype and shape; inf or NaN where either is not finite."""
    for some in chunks(list(zip(arrays, others))):
        _sgd(some, [array for array, _ in some], rate=1.0)()


def widen_all(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Return new FP32 copies of float16 arrays. -0 becomes 0 in both."""
    full: list[NDArray] = []
    for some in chunks(arrays):
        # MXNet allocates an operator's output when the operator runs, but ``empty`` at once.
        copies = FlatCopies.like(some, mx.nd.zeros(sum(array.size for array in some), some[0].ctx)).each
        _widen(some, copies)()
        full += copies
    return full


def widening(arrays: Sequence[NDArray], copies: FlatCopies, *, at_once: bool) -> list[Prepared]:
    """Return the operators that copy float16 arrays of one device into ``copies``, to call again and again.
    ``at_once``: one for many arrays."""
    ctx = arrays[0].ctx
    if not at_once:
        return [Prepared("Cast", [a], [copy], dtype="float32") for a, copy in zip(arrays, copies.each)]
    zeros = Prepared("_zeros", [], [copies.flat], shape=copies.flat.shape, ctx=ctx, dtype="float32")
    return [zeros, *map(_widen, chunks(arrays), chunks(copies.each))]


def _widen(arrays: Sequence[NDArray], zeros: Sequence[NDArray]) -> Prepared:
    # FP32 zeros minus -1 times the array; each result is also written back into its float16 array.
    return _sgd(list(zip(arrays, arrays, zeros)), list(arrays), rate=-1.0)


def round_all(triples: Sequence[tuple[NDArray, NDArray, NDArray]]) -> None:
    """Round the first array of each triple, FP32, into the second, float16; -0 may become 0 in both, an inf NaN."""
    for some in chunks(triples):
        _round(some)()


def rounding(triples: Sequence[tuple[NDArray, NDArray, NDArray]], *, at_once: bool) -> list[Prepared]:
    """Return the operators of ``round_all`` for arrays of one device, to call again and again.
    ``at_once``: one for many arrays."""
    if not at_once:
        return [Prepared("Cast", [full], [half], dtype="float16") for full, half, _ in triples]
    return list(map(_round, chunks(triples)))


def _round(triples: Sequence[tuple[NDArray, NDArray, NDArray]]) -> Prepared:
    # The third array, float16 and finite, is the gradient, which is multiplied by 0.
    return _sgd([(half, finite, full) for full, half, finite in triples], [half for _, half, _ in triples], rate=0.0)


def _sgd(weights: Sequence[tuple[NDArray, ...]], out: list[NDArray], *, rate: float) -> Prepared:
    """Write ``weight - rate * gradient`` to ``out``; of a triple, change the FP32 weight in place and round it."""
    operator, n = "multi_sgd_update" if len(weights[0]) == 2 else "multi_mp_sgd_update", len(out)
    inputs = [array for group in weights for array in group]
    return Prepared(operator, inputs, out, num_weights=n, lrs=[rate] * n, wds=[0.0] * n)


def distances(pairs: Sequence[tuple[NDArray, NDArray]]) -> Scalars:
    """Return one number per pair of a master and a float16 array: 0 if that is the rounded master; inf or NaN if an
    array has one."""
    devices: dict[mx.Context, list[int]] = {}
    for i, (_, half) in enumerate(pairs):
        devices.setdefault(half.ctx, []).append(i)
    found: Scalars = []
    # The sum of squared differences. Different float16 numbers differ by at least 2**-24, and 2**-48 is a normal FP32
    # number, so the sum for different arrays is never 0. Takes 6 bytes of memory per element for a short time.
    with autograd.pause():
        for members in devices.values():
            masters = [pairs[i][0].as_nd_ndarray() for i in members]
            arrays = [pairs[i][1].as_nd_ndarray() for i in members]
            copies = FlatCopies.like(masters)
            copy_all(masters, copies.each)
            rounded = FlatCopies.like(arrays, mx.nd.Cast(copies.flat, dtype="float16"))
            subtract_all(rounded.each, arrays)
            mx.nd.Cast(rounded.flat, dtype="float32", out=copies.flat)
            found.append((mx.nd.multi_sum_sq(*copies.each, num_arrays=len(members)), members))
    return found


def chunks(items: Sequence[Any], size: int = _KERNEL_LIMIT) -> Iterator[list[Any]]:
    """Yield lists of ``size`` items, and one of the rest."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))
