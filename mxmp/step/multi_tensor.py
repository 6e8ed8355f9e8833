"""One operator for many arrays. Where MXNet has none, an SGD step of a fixed size does the same.

Each operator is a launch on a GPU. No function here waits for a device, and all arrays of a call are on one device.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

# The number of weights that one kernel takes (MultiSGDKernelParam in MXNet's optimizer_op-inl.h).
_KERNEL_LIMIT = 60


class FlatCopies(NamedTuple):
    """Memory for copies of several arrays of one device: one vector ``flat``, and ``each``, a view into it per array.

    An operator on the vector, such as a cast, processes all copies at once. A view has the array's shape.
    """

    flat: NDArray
    each: list[NDArray]

    @classmethod
    def like(cls, arrays: Sequence[NDArray], flat: NDArray | None = None) -> FlatCopies:
        """Return a FlatCopies: a vector, and views into it in the order and shapes of ``arrays``. Copies no values.

        ``flat`` is the vector to use, of any dtype, with at least as many elements as all arrays together. None: a new
        FP32 vector, not initialized, on the device of the first array.
        """
        ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        flat = mx.nd.empty(ends[-1], arrays[0].ctx) if flat is None else flat
        return cls(flat, [flat[a:b].reshape(array.shape) for array, a, b in zip(arrays, ends, ends[1:])])


def copy_all(arrays: Sequence[NDArray], copies: Sequence[NDArray], after: NDArray | None = None) -> None:
    """Copy each of ``arrays``, which are FP32, into the FP32 array of the same position and shape in ``copies``.

    Runs one operator for every 60 arrays, or for every 59 with ``after``, an FP32 array of any shape. Each operator
    also reads ``after``, which changes no copy: MXNet's engine then starts the copies only after this array is
    computed. In a copy an inf becomes NaN, and -0 becomes 0, because the operator is an SGD update of learning rate 0.
    Does not wait for the device.
    """
    unused = [] if after is None else [(after, mx.nd.empty(after.shape, after.ctx))]
    for some in _chunks(list(zip(arrays, copies)), _KERNEL_LIMIT - len(unused)):
        pairs = [*some, *unused]
        _sgd([(array, array) for array, _ in pairs], [copy for _, copy in pairs], rate=0.0)


def subtract_all(arrays: Sequence[NDArray], others: Sequence[NDArray]) -> None:
    """Compute ``array -= other`` for each pair from ``arrays`` and ``others``, with one operator for every 60 pairs.

    Both arrays of a pair have one dtype and shape. Where an element of either is not finite, the difference is inf or
    NaN. Does not wait for the device.
    """
    for some in _chunks(list(zip(arrays, others))):
        _sgd(some, [array for array, _ in some], rate=1.0)


def widen_all(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Return a new FP32 copy of each float16 array, with one operator for every 60 arrays. Does not wait.

    The operator is an SGD update of FP32 zeros, with the array as gradient and -1 as learning rate. It also writes each
    result back into its float16 array. All values stay the same, except that -0 becomes 0 in both.
    """
    full: list[NDArray] = []
    for some in _chunks(arrays):
        # MXNet allocates an operator's output when the operator runs, but ``empty`` at once.
        copies = FlatCopies.like(some, mx.nd.zeros(sum(array.size for array in some), some[0].ctx)).each
        _sgd(zip(some, some, copies), some, rate=-1.0)
        full += copies
    return full


def round_all(triples: Sequence[tuple[NDArray, NDArray, NDArray]]) -> None:
    """Round the first array of each triple, FP32, into the second, float16, with one operator for every 60 triples.

    A triple is (FP32 source, float16 target, any float16 array of the same shape with finite values). The operator is
    an SGD update of the source with learning rate 0; it needs the third array as a gradient, and multiplies it by 0. In
    both source and target, -0 may become 0, and an inf becomes NaN. Does not wait.
    """
    for some in _chunks(triples):
        _sgd([(half, finite, full) for full, half, finite in some], [half for _, half, _ in some], rate=0.0)


def _sgd(weights: Iterable[tuple[NDArray, ...]], out: list[NDArray], *, rate: float) -> None:
    """Run one SGD update, without momentum and weight decay and with learning rate ``rate``, on at most 60 ``weights``.

    For pairs (weight, gradient) it writes ``weight - rate * gradient`` to ``out``. For triples (float16 weight,
    gradient, FP32 weight) it changes the FP32 weight in place, and writes it, rounded to float16, to ``out``.
    """
    groups = list(weights)
    update = mx.nd.multi_sgd_update if len(groups[0]) == 2 else mx.nd.multi_mp_sgd_update
    n = len(out)
    update(*(array for group in groups for array in group), out=out, num_weights=n, lrs=[rate] * n, wds=[0.0] * n)


def _chunks(items: Sequence[Any], size: int = _KERNEL_LIMIT) -> Iterator[list[Any]]:
    """Yield the items in their order, in lists of at most ``size``: MXNet's SGD operator takes at most 60 weights."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))
