"""Arrays of a replay in NumPy."""

from __future__ import annotations

import numpy as np
from mxnet.ndarray import NDArray

from ...precision.monitoring import in_full


def full(array: NDArray) -> np.ndarray:
    """Return the values in FP32; waits for the device."""
    return in_full(array).asnumpy().astype(np.float32, copy=False)


def is_float(array: NDArray) -> bool:
    return np.dtype(array.dtype).kind in "fV"  # V is bfloat16
