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

# On a CPU ``dot`` sums squares at 0.2 ns an element. ``multi_sum_sq`` needs 1 ns, and is less exact, since it adds one
# element after the other; but it is one operator for many arrays. A norm must be exact, so it uses ``dot`` for smaller
# arrays, too; the check only needs to know whether a sum is finite.
_NORM_BY_DOT, _CHECK_BY_DOT = 1 << 14, 1 << 16
_MOST_BY_DOT = 12  # in a check: so many, the largest arrays
# MXNet's multi_all_finite has memory for so many arrays, and writes beyond it if there are more
# (src/operator/contrib/all_finite-inl.h).
_MOST_CHECKED = 200

# FP32 vectors on their devices, not yet computed, and the positions of the gradients that their elements belong to.
Scalars = List[Tuple[NDArray, List[int]]]


class Gradient(NamedTuple):
    """The gradient of one parameter on one device.

    Attributes
    ----------
    name : str
        Name of the parameter (``"fc1_weight"``).
    array : NDArray
        The gradient itself, not a copy: of any float dtype, dense or row-sparse.
    """

    name: str
    array: NDArray

    def __str__(self) -> str:
        """Return name and device, as in errors and logs: ``"fc1_weight on gpu(0)"``."""
        return f"{self.name} on {self.array.ctx}"


class FiniteSums:
    """Computes for each gradient one FP32 number that is not finite if an element of the gradient is not finite.

    The number is the sum of squares, with the exceptions below, and few operators compute all of them. Finite elements
    beyond 1e19 may make it inf as well, so a number that is not finite is only a suspicion, and ``non_finite`` decides.
    The constructor chooses the operators; calling the object runs them on the values of that moment. So one object
    serves all steps, which have the same arrays.

    Parameters
    ----------
    gradients : sequence of Gradient
        The arrays to read in every call.
    dot_from : int
        On a CPU a dense array with at least so many elements is summed by an operator of its own, which is faster.
        Other arrays of one device, dtype and storage share an operator.
    most : int or None
        How many arrays may have an operator of their own: the largest. None: any number.
    check_only : bool
        True: for a float16 array on a CPU the number is no sum, but 0, or -inf where this array or another one of up to
        200 that are checked with it is not finite. False: such arrays are cast to FP32 and summed, which takes longer.
        (MXNet's CPU kernels square float16 in float16, which overflows at 256.)
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
        """Return whether this object reads the arrays of ``gradients``: the same NDArray objects in the same order.

        If not, the caller makes a new FiniteSums. Names are not compared.
        """
        return len(gradients) == len(self._arrays) and all(map(is_, [g.array for g in gradients], self._arrays))

    def __call__(self) -> Scalars:
        """Compute each gradient's number from its present values, without waiting for a device.

        Returns a list of (FP32 vector on a device, positions in ``gradients`` that its elements belong to), for
        ``fetch``.
        """
        found: Scalars = []
        for array, i in self._alone:
            flat = _for_squares(array)
            found.append((mx.nd.dot(flat, flat), [i]))
        for members in self._together.values():
            arrays = [_for_squares(self._arrays[i]) for i in members]
            found.append((mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays)), members))
        for everything in self._checked.values():
            for start in range(0, len(everything), _MOST_CHECKED):
                members = everything[start : start + _MOST_CHECKED]
                arrays = [_dense_values(self._arrays[i]) for i in members]
                finite = mx.nd.multi_all_finite(*arrays, num_arrays=len(arrays))
                found.append((mx.nd.broadcast_to(mx.nd.log(finite), (len(members),)), members))
        return found


def square_sums(gradients: Sequence[Gradient]) -> Scalars:
    """Compute the sum of squares of each gradient in FP32, without waiting for a device.

    Returns a list of (FP32 vector on a device, positions in ``gradients`` that its elements belong to), for ``fetch``.
    A sum is inf where it exceeds FP32's range.
    """
    return FiniteSums(gradients, _NORM_BY_DOT, most=None, check_only=False)()


def zeros_and_peaks(gradients: Sequence[Gradient]) -> list[Scalars]:
    """Compute for each gradient its share of zeros and its largest absolute value, without waiting for a device.

    Returns two groups for ``fetch``: first the shares, from 0 to 1, of elements that are 0; then the largest absolute
    values. A group is a list of (FP32 vector of one element, [position in ``gradients``]). Of a row-sparse gradient
    only the stored rows count.
    """
    values = [_dense_values(gradient.array).astype("float32", copy=False) for gradient in gradients]
    zeros = [((each == 0).mean(), [i]) for i, each in enumerate(values)]
    return [zeros, [(each.abs().max(), [i]) for i, each in enumerate(values)]]


def largest_on_cpu(arrays: Sequence[NDArray], least: int, most: int | None = None) -> list[int]:
    """Return the positions in ``arrays`` of dense CPU arrays with at least ``least`` elements, the largest array first.

    ``most`` limits the number of positions; None: all of them. Such arrays are faster with an operator of their own.
    """
    dense = [i for i, array in enumerate(arrays) if array.stype == "default" and not _on_gpu(array)]
    return sorted((i for i in dense if arrays[i].size >= least), key=lambda i: -arrays[i].size)[:most]


def fetch(*groups: Scalars) -> list[np.ndarray]:
    """Copy numbers from their devices to the host, and return one float32 NumPy array for each of ``groups``.

    A group is a list of (FP32 vector on a device, positions), as ``FiniteSums`` or ``distances`` returns it:
    ``positions[k]`` says at which index of the NumPy array element ``k`` of the vector is put. Vectors are joined on
    the devices first, so that there is one transfer for all groups. Waits for the devices.
    """
    found = [np.empty(sum(len(members) for _, members in group), np.float32) for group in groups]
    devices: dict[mx.Context, list[tuple[NDArray, list[int], np.ndarray]]] = {}
    for values, group in zip(found, groups):
        for array, members in group:
            devices.setdefault(array.ctx, []).append((array, members, values))
    if not devices:
        return found
    home = next(iter(devices))
    vectors = [_concatenated([array for array, *_ in each]).as_in_context(home) for each in devices.values()]
    host = _concatenated(vectors).asnumpy()
    end = 0
    for each in devices.values():
        for array, members, values in each:
            start, end = end, end + array.size
            values[members] = host[start:end]
    return found


def non_finite(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return those of ``gradients`` that hold an inf or a NaN, in their order. Waits for the device.

    Looks at every element, unlike sums of squares, which overflow for large finite elements too.
    """
    values = [_dense_values(gradient.array).astype("float32", copy=False) for gradient in gradients]
    (flags,) = fetch([(mx.nd.all_finite(each), [i]) for i, each in enumerate(values)])
    return [gradient for gradient, finite in zip(gradients, flags) if not finite]


class Overflows:
    """Remembers which gradients held an inf or NaN at one moment, to make the later check of the step find an overflow.

    ``Trainer.unscale`` makes one, because the user may change gradients afterwards: clipping to a range, for example,
    turns an inf into a large finite number. Row-sparse gradients are left out. Does not wait for a device.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        dense = [gradient.array for gradient in gradients if gradient.array.stype == "default"]
        with autograd.pause():
            self._zeros = [0 * mx.nd.log(mx.nd.all_finite(array.astype("float32", copy=False))) for array in dense]
        self._firsts = [array.reshape((-1,))[:1] for array in dense]

    def put_back(self) -> None:
        """Write a NaN into the first element of each dense gradient that was not finite when this object was made.

        Leaves all other gradients as they are. To be called before gradients are summed over devices and workers, so
        that every worker skips the step. Does not wait for a device.
        """
        with autograd.pause():
            for first, zero in zip(self._firsts, self._zeros):  # ``zero`` is 0, or NaN after an overflow
                first += zero.astype(first.dtype, copy=False)


def norm(gradients: Sequence[Gradient]) -> float:
    """Return the L2 norm over all elements of all gradients, as a Python float. Waits for the device.

    It is inf or NaN only if an element is. Where the squares of finite elements exceed FP32's range, it is computed
    again from gradients that are multiplied by 2**-80.
    """
    total = _root_of_sum(gradients)
    if math.isfinite(total) or non_finite(gradients):
        return total
    # Finite elements whose squares overflow FP32: sum the squares of a rescaled copy.
    shrunk = [Gradient(g.name, _dense_values(g.array).astype("float32") * _SHRINK) for g in gradients]
    return _root_of_sum(shrunk) / _SHRINK


def is_finite(array: NDArray) -> NDArray:
    """Return an array of the same shape and dtype with 1 for each finite element and 0 for each inf or NaN.

    Does not wait for a device. ``mx.nd.contrib.isfinite`` is not used, since it passes an ``inf`` to MXNet as text.
    MXNet's parser refuses that text where an operator has set ``errno`` in this thread before ("Out of range value for
    scalar"), as every operator may with ``MXNET_ENGINE_TYPE=NaiveEngine``.
    """
    return (array - array) == 0


def unscale(gradients: Sequence[Gradient], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place; ``factor`` is the inverse of the loss scale. Does not wait.

    Raises
    ------
    ValueError
        A gradient is float16, in which small unscaled values would become 0. No gradient has been changed.
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
    """Return the square root of the sum of squares of all elements, inf where a gradient's sum exceeds FP32's range."""
    return math.sqrt(float(np.sum(fetch(square_sums(gradients))[0], dtype=np.float64)))


def _on_gpu(array: NDArray) -> bool:
    """Return whether the array is on a GPU."""
    return array.ctx.device_type == "gpu"


def _dense_values(array: NDArray) -> NDArray:
    """Return a dense array as it is; of a row-sparse array the stored rows, as a dense copy."""
    return array if array.stype == "default" else array.data


def _for_squares(array: NDArray) -> NDArray:
    """Return a gradient's values in a dtype in which MXNet may square them: in FP32 on a CPU, unchanged on a GPU.

    MXNet's CPU kernels square in the dtype of their input, and the square of 256 is beyond float16.
    """
    values = _dense_values(array)
    return values if _on_gpu(values) else values.astype("float32", copy=False)


def _concatenated(arrays: Sequence[NDArray]) -> NDArray:
    """Return the concatenation of FP32 vectors that are on one device.

    On a GPU it copies each vector into a part of the result: MXNet's ``concat`` launches a kernel for each.
    """
    if len(arrays) == 1:
        return arrays[0]
    if not _on_gpu(arrays[0]):
        return mx.nd.concat(*arrays, dim=0)
    ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
    joined = mx.nd.empty(ends[-1], ctx=arrays[0].ctx)
    for array, start, end in zip(arrays, ends, ends[1:]):
        array.copyto(joined[start:end])  # launches no kernel
    return joined
