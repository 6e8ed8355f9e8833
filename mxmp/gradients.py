"""Finite check, norm and unscaling of gradients; the only place that waits for a device.

One reduction serves both questions: the sum of squares of each array, in FP32. It is finite where all
elements are, unless finite elements are beyond 1e19, so a sum that overflows is confirmed element by
element before it is called an overflow.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

__all__ = ["Gradient", "fetch", "non_finite", "norm", "square_sums", "unscale"]

# Measured on the CPU: below this size one multi_sum_sq over many arrays beats a dot for each; above it
# dot is twice as fast.
_SMALL = 1 << 14


class Gradient(NamedTuple):
    """One parameter's gradient on one device. ``array``: any float dtype, dense or row-sparse."""

    name: str
    array: NDArray

    def __str__(self) -> str:
        return f"{self.name} on {self.array.ctx}"


def square_sums(gradients: Sequence[Gradient]) -> list[NDArray]:
    """The sum of squares of every gradient, in FP32, without waiting.

    Returns
    -------
    list of NDArray
        FP32 of shape (1,) each, on the gradients' devices, in their order.
    """
    sums: list[NDArray | None] = [None] * len(gradients)
    batches: dict[tuple, list[tuple[int, NDArray]]] = {}
    for i, gradient in enumerate(gradients):
        array = _values(gradient.array)
        on_gpu = array.ctx.device_type == "gpu"
        if not on_gpu:  # there the kernels square in the array's dtype, and float16 ends at 256**2
            array = array.astype("float32", copy=False)
        if on_gpu or array.size < _SMALL:
            batches.setdefault((array.ctx, array.dtype), []).append((i, array))
        else:
            flat = array.reshape((-1,))
            sums[i] = mx.nd.dot(flat, flat).reshape((1,))
    for members in batches.values():
        together = mx.nd.multi_sum_sq(*(array for _, array in members), num_arrays=len(members))
        for k, (i, _) in enumerate(members):
            sums[i] = together[k : k + 1]
    return sums


def fetch(scalars: Sequence[NDArray]) -> np.ndarray:
    """Bring FP32 scalars of any devices to the host, in one transfer. Synchronizes.

    Returns
    -------
    numpy.ndarray
        float32 of shape (len(scalars),).
    """
    if not scalars:
        return np.zeros((0,), np.float32)
    by_device: dict[mx.Context, list[int]] = {}
    for i, scalar in enumerate(scalars):
        by_device.setdefault(scalar.ctx, []).append(i)
    home = scalars[0].ctx
    parts = [mx.nd.concat(*(scalars[i] for i in members), dim=0) for members in by_device.values()]
    joined = mx.nd.concat(*(part.as_in_context(home) for part in parts), dim=0).asnumpy()
    out = np.empty(len(scalars), np.float32)
    out[[i for members in by_device.values() for i in members]] = joined
    return out


def non_finite(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Those that hold an inf or NaN, element by element. Synchronizes."""
    if not gradients:
        return []
    flags = [mx.nd.all_finite(_values(g.array).astype("float32", copy=False)) for g in gradients]
    return [g for g, finite in zip(gradients, fetch(flags)) if not finite]


def norm(gradients: Sequence[Gradient]) -> float:
    """The global L2 norm; inf or NaN only where an element is. Synchronizes."""
    total = math.sqrt(float(np.sum(fetch(square_sums(gradients)), dtype=np.float64)))
    if math.isfinite(total) or non_finite(gradients):
        return total
    # Finite elements whose squares overflow FP32: sum the squares of a rescaled copy.
    shrunk = [Gradient(g.name, _values(g.array).astype("float32") * _SHRINK) for g in gradients]
    return math.sqrt(float(np.sum(fetch(square_sums(shrunk)), dtype=np.float64))) / _SHRINK


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
