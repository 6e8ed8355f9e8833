"""Finite check, norm and unscaling of gradients; ``fetch`` is the only wait of a step with dense, finite gradients.
One reduction serves check and norm: the FP32 sum of squares of each array. A sum that is not finite is confirmed
element by element, since finite elements beyond 1e19 overflow it too.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from . import _mxnet

# On a CPU ``dot`` sums squares at 0.2 ns an element. ``multi_sum_sq`` needs 1 ns, and is less exact, since it adds one
# element after the other; but it is one operator for many arrays. A norm must be exact, so it uses ``dot`` for smaller
# arrays, too; the check only needs to know whether a sum is finite, and each operator takes time as well.
_NORM_BY_DOT, _CHECK_BY_DOT = 1 << 14, 1 << 16
# MXNet's multi_all_finite has memory for so many arrays, and writes beyond it if there are more
# (src/operator/contrib/all_finite-inl.h).
_MOST_CHECKED = 200

# FP32 vectors on their devices, not yet computed, and the positions of the gradients that their elements belong to.
Scalars = List[Tuple[NDArray, List[int]]]


class Gradient(NamedTuple):
    """The gradient of one parameter on one device."""

    name: str  # of the parameter, such as "fc1_weight"
    array: NDArray  # not a copy; of any float dtype, dense or row-sparse

    def __str__(self) -> str:
        return f"{self.name} on {self.array.ctx}"


class _Group(NamedTuple):
    """Arrays of one device, all dense or all row-sparse, whose numbers one operator computes."""

    members: list[int]  # positions in what the caller passed
    arrays: list[NDArray]
    operator: str
    attributes: dict[str, int]

    @property
    def is_ready(self) -> bool:
        """Return whether the operator reads the arrays themselves, and its outputs are the numbers."""
        first = self.arrays[0]
        is_sum = self.operator != _ALL_FINITE
        return is_sum and first.stype == "default" and (_on_gpu(first) or first.dtype == np.float32)

    def computed(self) -> tuple[NDArray, list[int]]:
        """Return the numbers and what they are of. Waits for row-sparse arrays."""
        if self.operator == _ALL_FINITE:
            finite = mx.nd.multi_all_finite(*map(_dense_values, self.arrays), **self.attributes)
            # ``finite`` is 1 or 0, and its logarithm 0 or -inf.
            return mx.nd.broadcast_to(mx.nd.log(finite), (len(self.members),)), self.members
        return getattr(mx.nd, self.operator)(*map(_for_squares, self.arrays), **self.attributes), self.members


class FiniteSums:
    """Computes one FP32 number for each gradient, which is inf, -inf or NaN if the gradient holds an inf or NaN.
    A finite gradient may get such a number, too, so the caller confirms these by ``non_finite``."""

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._arrays = [gradient.array for gradient in gradients]
        groups = _groups(self._arrays, exact=False)
        self._others = [group for group in groups if not group.is_ready]
        devices: dict[mx.Context, list[_Group]] = {}
        for group in groups:
            if group.is_ready:
                devices.setdefault(group.arrays[0].ctx, []).append(group)
        self._prepared = [_prepared(ctx, each) for ctx, each in devices.items()]

    def serves(self, gradients: Sequence[Gradient]) -> bool:
        return len(gradients) == len(self._arrays) and all(map(is_, [g.array for g in gradients], self._arrays))

    def __call__(self) -> Scalars:
        """Compute the numbers on their devices, for ``fetch``. Waits for row-sparse gradients, not for dense ones.
        The next call overwrites them."""
        for _, _, operators in self._prepared:
            for compute in operators:
                compute()
        return [*((vector, members) for vector, members, _ in self._prepared), *(g.computed() for g in self._others)]


def square_sums(gradients: Sequence[Gradient]) -> Scalars:
    """Return each gradient's sum of squares, for ``fetch``; inf beyond FP32's range. Waits for row-sparse ones only."""
    return [group.computed() for group in _groups([gradient.array for gradient in gradients], exact=True)]


_DOT, _SUMS, _ALL_FINITE = "dot", "multi_sum_sq", "multi_all_finite"


def _groups(arrays: Sequence[NDArray], *, exact: bool) -> list[_Group]:
    """Divide arrays by the operators that sum their squares or, unless ``exact``, that check them."""
    checked: dict[tuple, list[int]] = {}
    rest = []
    for i, array in enumerate(arrays):
        # MXNet's CPU kernels square float16 in float16, where the square of 256 overflows. Unless ``exact``, these
        # arrays are checked, not cast and summed, which takes longer; those of one operator get one number.
        if array.dtype == np.float16 and not _on_gpu(array) and not exact:
            checked.setdefault((array.ctx, array.stype), []).append(i)
        else:
            rest.append(i)
    least = _NORM_BY_DOT if exact else _CHECK_BY_DOT
    large = [rest[k] for k in largest_on_cpu([arrays[i] for i in rest], least)]
    together: dict[tuple, list[int]] = {}
    for i in sorted(set(rest).difference(large)):
        together.setdefault((arrays[i].ctx, arrays[i].dtype, arrays[i].stype), []).append(i)
    few = [group[k : k + _MOST_CHECKED] for group in checked.values() for k in range(0, len(group), _MOST_CHECKED)]
    flat = {i: arrays[i].reshape((-1,)) for i in large}
    return [
        *(_Group([i], [flat[i], flat[i]], _DOT, {}) for i in large),
        *(_Group(each, [arrays[i] for i in each], _SUMS, {"num_arrays": len(each)}) for each in together.values()),
        *(_Group(each, [arrays[i] for i in each], _ALL_FINITE, {"num_arrays": len(each)}) for each in few),
    ]


def _prepared(ctx: mx.Context, groups: Sequence[_Group]) -> tuple[NDArray, list[int], list[_mxnet.Prepared]]:
    """Return a vector of a device, the positions that its elements are of, and the operators that write it."""
    members = [i for group in groups for i in group.members]
    with autograd.pause():
        vector = mx.nd.zeros(len(members), ctx)
        operators, end = [], 0
        for group in groups:
            start, end = end, end + len(group.members)
            operators.append(_mxnet.Prepared(group.operator, group.arrays, [vector[start:end]], **group.attributes))
    return vector, members, operators


def zeros_and_peaks(gradients: Sequence[Gradient]) -> list[Scalars]:
    """Return each gradient's share of zeros, and its largest absolute value, as two groups for ``fetch``.
    Of a row-sparse gradient only stored rows count, for which it waits; without any, both numbers are 0."""
    return _of_each(gradients, lambda values: (values == 0).mean(), lambda values: values.abs().max())


def are_zero(gradients: Sequence[Gradient]) -> bool:
    """Return whether all elements of all gradients are 0. Waits for the device."""
    return not fetch(*_of_each(gradients, lambda values: (values != 0).max()))[0].any()


def largest_finite(gradients: Sequence[Gradient]) -> list[float]:
    """Return the largest finite absolute value of each gradient; 0 if it has none. Waits for the device."""

    def peak(values: NDArray) -> NDArray:
        return mx.nd.where(is_finite(values), values.abs(), mx.nd.zeros_like(values)).max()

    return fetch(*_of_each(gradients, peak))[0].tolist()


def _of_each(gradients: Sequence[Gradient], *functions: Callable[[NDArray], NDArray]) -> list[Scalars]:
    """Return, for each function, its result for the FP32 values of each gradient; 0 where no row is stored."""
    found: list[Scalars] = [[] for _ in functions]
    for i, gradient in enumerate(gradients):
        values = _dense_values(gradient.array).astype("float32", copy=False)
        for group, function in zip(found, functions):
            group.append((function(values) if values.size else mx.nd.zeros(1, values.ctx), [i]))
    return found


def listed(value: Any) -> list:
    """Return one loss, or a list of losses such as one per device, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def largest_on_cpu(arrays: Sequence[NDArray], least: int) -> list[int]:
    """Return the positions of the dense CPU arrays of at least ``least`` elements, the largest first."""
    # MXNet's operators for many arrays are slow for large ones, so each gets an operator of its own.
    dense = [i for i, array in enumerate(arrays) if array.stype == "default" and not _on_gpu(array)]
    return sorted((i for i in dense if arrays[i].size >= least), key=lambda i: -arrays[i].size)


def fetch(*groups: Scalars) -> list[np.ndarray]:
    """Return a float32 NumPy array per group, with the vectors' elements at their positions. Waits for the devices."""
    found = [np.empty(sum(len(members) for _, members in group), np.float32) for group in groups]
    devices: dict[mx.Context, list[tuple[NDArray, list[int], np.ndarray]]] = {}
    for values, group in zip(found, groups):
        for array, members in group:
            devices.setdefault(array.ctx, []).append((array, members, values))
    if not devices:
        return found
    # All vectors are joined on one device, so that one transfer to the host is enough.
    home = next(iter(devices))
    vectors = [concatenated([array for array, *_ in each]).as_in_context(home) for each in devices.values()]
    host = concatenated(vectors).asnumpy()
    end = 0
    for each in devices.values():
        for array, members, values in each:
            start, end = end, end + array.size
            values[members] = host[start:end]
    return found


def non_finite(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return the gradients that hold an inf, a NaN or a float64 value beyond FP32's range. Waits for the device."""
    values = [_dense_values(gradient.array).astype("float32", copy=False) for gradient in gradients]
    # A row-sparse gradient may have no stored row, and a GPU cannot check an empty array.
    some = [(gradient, each) for gradient, each in zip(gradients, values) if each.size]
    (flags,) = fetch([(mx.nd.all_finite(each), [i]) for i, (_, each) in enumerate(some)])
    return [gradient for (gradient, _), finite in zip(some, flags) if not finite]


class Overflows:
    """Remembers which dense gradients hold an inf or NaN when it is made. Does not wait for a device."""

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        # The user may change gradients between ``unscale`` and the step: clipping turns an inf into a large finite
        # number, and the step would not be skipped.
        dense = [gradient.array for gradient in gradients if gradient.array.stype == "default"]
        with autograd.pause():
            self._zeros = [0 * mx.nd.log(mx.nd.all_finite(array.astype("float32", copy=False))) for array in dense]
        self._firsts = [array.reshape((-1,))[:1] for array in dense]

    def put_back(self) -> None:
        """Write a NaN into each gradient that was not finite when this object was made."""
        # The Trainer calls it before it sums over devices and workers, so that all workers skip the step.
        with autograd.pause():
            for first, zero in zip(self._firsts, self._zeros):  # ``zero`` is 0, or NaN after an overflow
                first += zero.astype(first.dtype, copy=False)


def norm(gradients: Sequence[Gradient]) -> float:
    """Return the L2 norm over all gradients as a float; inf or NaN only if an element is. Waits for the device."""
    total = _root_of_sum(gradients)
    if _TINY < total < math.inf or (not math.isfinite(total) and non_finite(gradients)):
        return total
    # A sum is beyond FP32's range, or so small that squares may be 0: take it of multiplied copies.
    factor = _GROW if total <= _TINY else 1 / _GROW
    moved = [Gradient(g.name, _dense_values(g.array).astype("float32") * factor) for g in gradients]
    return _root_of_sum(moved) / factor


def is_finite(array: NDArray) -> NDArray:
    """Return 1 for each finite element and 0 for each inf or NaN, in the dtype of ``array`` (bool for ``mx.np``)."""
    # ``mx.nd.contrib.isfinite`` passes an inf to MXNet as text, which the parser refuses ("Out of range value for
    # scalar") if an operator on this thread has left ``errno`` set, as any may with MXNET_ENGINE_TYPE=NaiveEngine.
    return (array - array) == 0


def unscale(gradients: Sequence[Gradient], factor: float) -> None:
    """Multiply every gradient in place by ``factor``, the inverse of the loss scale. Does not wait for a device."""
    for gradient in gradients:
        if gradient.array.dtype == np.float16:
            raise ValueError(
                f"gradient {gradient.name!r} is float16 and cannot hold unscaled values: use "
                "clip_global_norm(), which works on the scaled ones, or Policy(params='float32')"
            )
    for gradient in gradients:
        array = gradient.array  # the values of a row-sparse array are a copy: multiply the array itself
        array *= factor


_TINY, _GROW = 2.0**-50, 2.0**80


def _root_of_sum(gradients: Sequence[Gradient]) -> float:
    return math.sqrt(float(np.sum(fetch(square_sums(gradients))[0], dtype=np.float64)))


def _on_gpu(array: NDArray) -> bool:
    return array.ctx.device_type == "gpu"


def _dense_values(array: NDArray) -> NDArray:
    """Return a dense array as it is; wait for a row-sparse array and return its stored rows, as a dense copy."""
    return array.as_nd_ndarray() if array.stype == "default" else array.data


def _for_squares(array: NDArray) -> NDArray:
    """Return a gradient's values as a dense array: FP32 on a CPU, unchanged on a GPU."""
    values = _dense_values(array)
    # MXNet's CPU kernels square in the dtype of their input, where 256 overflows float16; the GPU kernels square in
    # FP32.
    return values if _on_gpu(values) else values.astype("float32", copy=False)


def concatenated(arrays: Sequence[NDArray]) -> NDArray:
    """Return FP32 vectors of one device, joined into one vector; a single vector is returned as it is."""
    if len(arrays) == 1:
        return arrays[0]
    if not _on_gpu(arrays[0]):
        return mx.nd.concat(*arrays, dim=0)
    ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
    joined = mx.nd.empty(ends[-1], ctx=arrays[0].ctx)
    for array, start, end in zip(arrays, ends, ends[1:]):
        array.copyto(joined[start:end])  # launches no kernel; ``concat`` launches one for each
    return joined
