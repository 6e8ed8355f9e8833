"""Finite check, norm and unscaling of gradients; the only place that waits for a device.

One reduction serves both questions: the sum of squares of each array, in FP32. It is finite where all
elements are, unless finite elements are beyond 1e19, so a sum that overflows is confirmed element by
element before it is called an overflow.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Dict, List, NamedTuple, Sequence, Tuple

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


class Gradient(NamedTuple):
    """One parameter's gradient on one device. ``array``: any float dtype, dense or row-sparse."""

    name: str
    array: NDArray

    def __str__(self) -> str:
        return f"{self.name} on {self.array.ctx}"


class Scalars(NamedTuple):
    """FP32 scalars that wait on their devices.

    Attributes
    ----------
    arrays : list of NDArray
        FP32 of shape (n,), one per device.
    members : list of int
        What the elements of ``arrays``, one after the other, belong to.
    """

    arrays: list[NDArray]
    members: list[int]


# MXNet's kernel has room for so many arrays, and writes past it (src/operator/contrib/all_finite-inl.h).
_CHECKED = 200
# By device: FP32 arrays, and the gradients that their elements belong to.
_Made = Dict[mx.Context, List[Tuple[NDArray, List[int]]]]


class FiniteSums:
    """For every gradient a number that is finite where all elements are, by one operator for many.

    What each array is, and so which operator takes it, is asked once: a step takes the same arrays as the
    last one. Finite elements beyond 1e19 may give an inf too: see ``non_finite``.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._arrays = [gradient.array for gradient in gradients]
        half = [i for i, array in enumerate(self._arrays) if array.dtype == np.float16 and not _on_gpu(array)]
        rest = sorted(set(range(len(self._arrays))).difference(half))
        self._rest = _Groups(self._arrays, rest, _CHECK_BY_DOT, _MOST_BY_DOT)
        by_device: dict[mx.Context, list[int]] = {}
        for i in half:
            by_device.setdefault(self._arrays[i].ctx, []).append(i)
        self._half = [
            (ctx, members[start : start + _CHECKED])
            for ctx, members in by_device.items()
            for start in range(0, len(members), _CHECKED)
        ]

    def serves(self, gradients: Sequence[Gradient]) -> bool:
        """Whether it was made for these."""
        return len(gradients) == len(self._arrays) and all(map(is_, [g.array for g in gradients], self._arrays))

    def __call__(self) -> Scalars:
        """The numbers as they are now, without waiting."""
        made = self._rest.square_sums()
        for ctx, members in self._half:  # on the CPU a kernel that squares float16 overflows at 256
            finite = mx.nd.multi_all_finite(*(_values(self._arrays[i]) for i in members), num_arrays=len(members))
            made.setdefault(ctx, []).append((mx.nd.broadcast_to(mx.nd.log(finite), (len(members),)), members))
        return _scalars(made)


def square_sums(gradients: Sequence[Gradient]) -> Scalars:
    """The sum of squares of every gradient, in FP32, without waiting."""
    arrays = [gradient.array for gradient in gradients]
    return _scalars(_Groups(arrays, range(len(arrays)), _NORM_BY_DOT).square_sums())


def zeros_and_peaks(gradients: Sequence[Gradient]) -> list[Scalars]:
    """Of every gradient the share of its elements that is 0, and the largest absolute value, without waiting."""
    zeros: _Made = {}
    peaks: _Made = {}
    for i, gradient in enumerate(gradients):
        values = _values(gradient.array).astype("float32", copy=False)
        zeros.setdefault(values.ctx, []).append(((values == 0).mean(), [i]))
        peaks.setdefault(values.ctx, []).append((values.abs().max(), [i]))
    return [_scalars(zeros), _scalars(peaks)]


class _Groups:
    """Which arrays one operator takes together: those of one device and dtype, but for large ones on a CPU."""

    def __init__(self, arrays: Sequence[NDArray], which: Sequence[int], dot_from: int, most: int | None = None) -> None:
        self._together: dict[tuple, list[tuple[int, NDArray]]] = {}
        alone = [which[k] for k in largest_on_cpu([arrays[i] for i in which], dot_from, most)]
        self._alone = [(arrays[i].ctx, i, arrays[i].reshape((-1,))) for i in alone]
        for i in sorted(set(which).difference(alone)):
            array = arrays[i]
            self._together.setdefault((array.ctx, array.dtype, array.stype), []).append((i, array))

    def square_sums(self) -> _Made:
        made: _Made = {}
        for ctx, i, array in self._alone:
            flat = _full(array)
            made.setdefault(ctx, []).append((mx.nd.dot(flat, flat), [i]))
        for (ctx, dtype, stype), members in self._together.items():
            arrays = [array for _, array in members]
            if stype != "default" or (dtype != np.float32 and not _on_gpu(arrays[0])):
                arrays = [_full(array) for array in arrays]
            together = mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays))
            made.setdefault(ctx, []).append((together, [i for i, _ in members]))
        return made


def largest_on_cpu(arrays: Sequence[NDArray], least: int, most: int | None = None) -> list[int]:
    """Positions of the dense arrays on a CPU that have ``least`` elements or more: of the ``most`` largest."""
    dense = [i for i, array in enumerate(arrays) if array.stype == "default" and not _on_gpu(array)]
    return sorted((i for i in dense if arrays[i].size >= least), key=lambda i: -arrays[i].size)[:most]


def _full(array: NDArray) -> NDArray:
    """Its values, in FP32 on a CPU, where the kernels square in the array's dtype."""
    values = _values(array)
    return values if _on_gpu(values) else values.astype("float32", copy=False)


def _on_gpu(array: NDArray) -> bool:
    return array.ctx.device_type == "gpu"


def _joined(arrays: Sequence[NDArray]) -> NDArray:
    """Join FP32 vectors of one device. On a GPU ``concat`` launches a kernel for each, and a copy needs none."""
    if len(arrays) == 1:
        return arrays[0]
    if not _on_gpu(arrays[0]):
        return mx.nd.concat(*arrays, dim=0)
    ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
    joined = mx.nd.empty(ends[-1], ctx=arrays[0].ctx)
    for array, start, end in zip(arrays, ends, ends[1:]):
        array.copyto(joined[start:end])
    return joined


def _scalars(made: _Made) -> Scalars:
    arrays = [_joined([array for array, _ in items]) for items in made.values()]
    return Scalars(arrays, [i for items in made.values() for _, members in items for i in members])


def fetch(*groups: Scalars) -> list[np.ndarray]:
    """Bring scalars of any devices to the host, in one transfer. Synchronizes.

    Returns
    -------
    list of numpy.ndarray
        For every group, float32 by member.
    """
    arrays = [array for group in groups for array in group.arrays]
    by_device: dict[mx.Context, list[int]] = {}
    for i, array in enumerate(arrays):
        by_device.setdefault(array.ctx, []).append(i)
    parts = [_joined([arrays[i] for i in mine]) for mine in by_device.values()]
    home = [part.as_in_context(arrays[0].ctx) for part in parts]
    joined = _joined(home).asnumpy() if home else np.zeros(0, np.float32)
    order = [i for mine in by_device.values() for i in mine]
    ends = np.cumsum([arrays[i].size for i in order])
    pieces = dict(zip(order, np.split(joined, ends[:-1])))
    in_order = iter(pieces[i] for i in range(len(arrays)))
    out = []
    for group in groups:
        values = np.empty(len(group.members), np.float32)
        if group.arrays:
            values[group.members] = np.concatenate([next(in_order) for _ in group.arrays])
        out.append(values)
    return out


def non_finite(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Those that hold an inf or NaN, element by element. Synchronizes."""
    made: _Made = {}
    for i, gradient in enumerate(gradients):
        flag = mx.nd.all_finite(_values(gradient.array).astype("float32", copy=False))
        made.setdefault(flag.ctx, []).append((flag, [i]))
    (flags,) = fetch(_scalars(made))
    return [gradient for gradient, finite in zip(gradients, flags) if not finite]


class Overflows:
    """Remembers which gradients are not finite now, so that nothing that is written into them later hides it.

    Clipping to a range, for example, makes a large number of an inf. Does not wait.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        dense = [gradient.array for gradient in gradients if gradient.array.stype == "default"]
        with autograd.pause():
            self._zeros = [
                (array, 0 * mx.nd.log(mx.nd.all_finite(array.astype("float32", copy=False)))) for array in dense
            ]

    def put_back(self) -> None:
        """Make an element of each of them NaN again, before other workers and the check see it."""
        with autograd.pause():
            for array, zero in self._zeros:  # 0, or NaN
                first = array.reshape((-1,))[:1]
                first += zero.astype(first.dtype, copy=False)


def norm(gradients: Sequence[Gradient]) -> float:
    """The global L2 norm; inf or NaN only where an element is. Synchronizes."""
    total = math.sqrt(float(np.sum(fetch(square_sums(gradients))[0], dtype=np.float64)))
    if math.isfinite(total) or non_finite(gradients):
        return total
    # Finite elements whose squares overflow FP32: sum the squares of a rescaled copy.
    shrunk = [Gradient(g.name, _values(g.array).astype("float32") * _SHRINK) for g in gradients]
    return math.sqrt(float(np.sum(fetch(square_sums(shrunk))[0], dtype=np.float64))) / _SHRINK


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


def _values(array: NDArray) -> NDArray:
    """The dense values of a gradient; a row-sparse one holds them apart from its row numbers."""
    return array if array.stype == "default" else array.data


_SHRINK = 2.0**-80
