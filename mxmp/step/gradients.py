"""Finite check, norm and unscaling of gradients; the only place that waits for a device.

One reduction serves check and norm: the sum of squares of each array, in FP32. It is finite where all elements are,
unless finite elements are beyond 1e19, so a sum that overflows is confirmed element by element before it is called an
overflow.
"""

from __future__ import annotations

import math
from operator import is_
from typing import List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

__all__ = [
    "FiniteSums",
    "Gradient",
    "Overflows",
    "Scalars",
    "fetch",
    "is_finite",
    "largest_on_cpu",
    "non_finite",
    "norm",
    "square_sums",
    "unscale",
    "zeros_and_peaks",
]

# On a CPU dot sums squares at 0.2 ns an element, multi_sum_sq over many arrays at 1 ns and, one after the other, less
# exactly; but dot is an operator for each array. A norm is exact; a check only asks whether a sum is finite.
_NORM_BY_DOT, _CHECK_BY_DOT = 1 << 14, 1 << 16
_MOST_BY_DOT = 12  # in a check: the largest
# MXNet's multi_all_finite has room for so many arrays, and writes past it (src/operator/contrib/all_finite-inl.h).
_MOST_CHECKED = 200

# FP32 vectors on their devices, not yet computed, and the positions of the gradients that their elements belong to.
Scalars = List[Tuple[NDArray, List[int]]]


class Gradient(NamedTuple):
    """One parameter's gradient on one device. ``array``: any float dtype, dense or row-sparse."""

    name: str
    array: NDArray

    def __str__(self) -> str:
        return f"{self.name} on {self.array.ctx}"


class FiniteSums:
    """Computes for each gradient a number that is finite where all elements are, by one operator for many.

    The operator for each array is chosen once, since a step takes the same arrays as the last one: dense ones of
    ``dot_from`` elements or more on a CPU, the ``most`` largest of them, are summed one by one; the others of one
    device, dtype and storage together. On a CPU MXNet's kernels square float16 in float16, which overflows at 256: with
    ``check_only`` the number for a float16 array there is 0, or -inf where any array of its group is not finite;
    without, each is cast and summed in FP32. Finite elements beyond 1e19 may give an inf too: see ``non_finite``.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        dot_from: int = _CHECK_BY_DOT,
        most: int | None = _MOST_BY_DOT,
        *,
        check_only: bool = True,
    ) -> None:
        self._arrays = [gradient.array for gradient in gradients]
        half = [i for i, array in enumerate(self._arrays) if array.dtype == np.float16 and not _on_gpu(array)]
        self._checked: dict[mx.Context, list[int]] = {}
        for i in half if check_only else ():
            self._checked.setdefault(self._arrays[i].ctx, []).append(i)
        rest = sorted(set(range(len(self._arrays))).difference(half if check_only else ()))
        large = [rest[k] for k in largest_on_cpu([self._arrays[i] for i in rest], dot_from, most)]
        self._alone = [(self._arrays[i].reshape((-1,)), i) for i in large]
        self._together: dict[tuple, list[int]] = {}
        for i in sorted(set(rest).difference(large)):
            array = self._arrays[i]
            self._together.setdefault((array.ctx, array.dtype, array.stype), []).append(i)

    def serves(self, gradients: Sequence[Gradient]) -> bool:
        """Return whether it was made for these."""
        return len(gradients) == len(self._arrays) and all(map(is_, [g.array for g in gradients], self._arrays))

    def __call__(self) -> Scalars:
        """Return the sums of squares of the arrays as they are now, in FP32, without waiting."""
        found: Scalars = []
        for array, i in self._alone:
            flat = _full(array)
            found.append((mx.nd.dot(flat, flat), [i]))
        for members in self._together.values():
            arrays = [_full(self._arrays[i]) for i in members]
            found.append((mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays)), members))
        for everything in self._checked.values():
            for start in range(0, len(everything), _MOST_CHECKED):
                members = everything[start : start + _MOST_CHECKED]
                arrays = [_values(self._arrays[i]) for i in members]
                finite = mx.nd.multi_all_finite(*arrays, num_arrays=len(arrays))
                found.append((mx.nd.broadcast_to(mx.nd.log(finite), (len(members),)), members))
        return found


def square_sums(gradients: Sequence[Gradient]) -> Scalars:
    """Return the sum of squares of each gradient, in FP32, without waiting."""
    return FiniteSums(gradients, _NORM_BY_DOT, most=None, check_only=False)()


def zeros_and_peaks(gradients: Sequence[Gradient]) -> list[Scalars]:
    """Return for each gradient the share of its elements that is 0, and the largest absolute value, without waiting."""
    values = [_values(gradient.array).astype("float32", copy=False) for gradient in gradients]
    zeros = [((each == 0).mean(), [i]) for i, each in enumerate(values)]
    return [zeros, [(each.abs().max(), [i]) for i, each in enumerate(values)]]


def largest_on_cpu(arrays: Sequence[NDArray], least: int, most: int | None = None) -> list[int]:
    """Return the positions of the dense arrays on a CPU with ``least`` elements or more: of the ``most`` largest."""
    dense = [i for i, array in enumerate(arrays) if array.stype == "default" and not _on_gpu(array)]
    return sorted((i for i in dense if arrays[i].size >= least), key=lambda i: -arrays[i].size)[:most]


def fetch(*groups: Scalars) -> list[np.ndarray]:
    """Return the scalars of each group on the host: float32, by position. Synchronizes, with one transfer for all."""
    found = [np.empty(sum(len(members) for _, members in group), np.float32) for group in groups]
    devices: dict[mx.Context, list[tuple[NDArray, list[int], np.ndarray]]] = {}
    for values, group in zip(found, groups):
        for array, members in group:
            devices.setdefault(array.ctx, []).append((array, members, values))
    if not devices:
        return found
    home = next(iter(devices))
    host = _joined([_joined([array for array, *_ in each]).as_in_context(home) for each in devices.values()]).asnumpy()
    end = 0
    for each in devices.values():
        for array, members, values in each:
            start, end = end, end + array.size
            values[members] = host[start:end]
    return found


def non_finite(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return those that hold an inf or NaN, element by element. Synchronizes."""
    values = [_values(gradient.array).astype("float32", copy=False) for gradient in gradients]
    (flags,) = fetch([(mx.nd.all_finite(each), [i]) for i, each in enumerate(values)])
    return [gradient for gradient, finite in zip(gradients, flags) if not finite]


class Overflows:
    """Remembers which gradients are not finite now, so that nothing that is written into them later hides it.

    Clipping to a range, for example, makes a large number of an inf. Does not wait.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        dense = [gradient.array for gradient in gradients if gradient.array.stype == "default"]
        with autograd.pause():
            self._zeros = [0 * mx.nd.log(mx.nd.all_finite(array.astype("float32", copy=False))) for array in dense]
        self._firsts = [array.reshape((-1,))[:1] for array in dense]

    def put_back(self) -> None:
        """Make an element of each of them NaN again, before other workers and the check read it."""
        with autograd.pause():
            for first, zero in zip(self._firsts, self._zeros):  # 0, or NaN
                first += zero.astype(first.dtype, copy=False)


def norm(gradients: Sequence[Gradient]) -> float:
    """Return the global L2 norm; inf or NaN only where an element is. Synchronizes."""
    total = _root_of_sum(gradients)
    if math.isfinite(total) or non_finite(gradients):
        return total
    # Finite elements whose squares overflow FP32: sum the squares of a rescaled copy.
    return _root_of_sum([Gradient(g.name, _values(g.array).astype("float32") * _SHRINK) for g in gradients]) / _SHRINK


def is_finite(array: NDArray) -> NDArray:
    """Return 1 for each finite element and 0 for each other, in the array's dtype, without waiting.

    ``mx.nd.contrib.isfinite`` compares with an ``inf`` that it passes as text. MXNet's parser refuses that text where
    an operator has set ``errno`` in this thread before ("Out of range value for scalar"), as every operator may with
    ``MXNET_ENGINE_TYPE=NaiveEngine``.
    """
    return (array - array) == 0


def unscale(gradients: Sequence[Gradient], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place, without waiting.

    Raises
    ------
    ValueError
        A gradient is float16: unscaled, it would flush to zero there. Nothing is changed.
    """
    for gradient in gradients:
        if gradient.array.dtype == np.float16:
            raise ValueError(
                f"gradient {gradient.name!r} is float16 and cannot hold unscaled values: use "
                "clip_global_norm(), which works on the scaled ones, or Policy(params='float32')"
            )
    for gradient in gradients:
        array = gradient.array  # the values of a row-sparse array are a copy: multiply the array itself
        array *= factor


_SHRINK = 2.0**-80


def _root_of_sum(gradients: Sequence[Gradient]) -> float:
    return math.sqrt(float(np.sum(fetch(square_sums(gradients))[0], dtype=np.float64)))


def _on_gpu(array: NDArray) -> bool:
    return array.ctx.device_type == "gpu"


def _values(array: NDArray) -> NDArray:
    """Return the dense values of a gradient; a row-sparse one holds them apart from its row numbers."""
    return array if array.stype == "default" else array.data


def _full(array: NDArray) -> NDArray:
    """Return the array's values, cast to FP32 on a CPU: its kernels square in the dtype of their input."""
    values = _values(array)
    return values if _on_gpu(values) else values.astype("float32", copy=False)


def _joined(arrays: Sequence[NDArray]) -> NDArray:
    """Return the concatenation of FP32 vectors of one device. On a GPU ``concat`` launches a kernel for each."""
    if len(arrays) == 1:
        return arrays[0]
    if not _on_gpu(arrays[0]):
        return mx.nd.concat(*arrays, dim=0)
    ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
    joined = mx.nd.empty(ends[-1], ctx=arrays[0].ctx)
    for array, start, end in zip(arrays, ends, ends[1:]):
        array.copyto(joined[start:end])  # no kernel
    return joined
