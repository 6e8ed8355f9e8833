"""Records how large the tensors of a step are, in the order in which they are computed, and which are not finite."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...observed import Observed
from ...precision._mxnet import dtype_name
from ...step.gradients import Gradient, is_finite
from ...step.masters import Weight
from ..networks.probe import values_of
from .report import Range
from .verdict import Record


class Recording:
    """The value ranges of the tensors of one step, with the operators that made them, in the order of recording."""

    def __init__(self) -> None:
        # Each with a function that waits for the range, which is still being computed on its device.
        self._pending: list[tuple[Observed | None, Callable[[], Range]]] = []

    @property
    def has_operators(self) -> bool:
        """Return whether an operator of the network, or a cast, made a recorded tensor."""
        return any(observed for observed, _ in self._pending)

    def note(self, name: str, array: NDArray, observed: Observed | None = None) -> None:
        """Record the range of a float tensor; ``observed`` is None if no operator or cast made it. Waits if sparse."""
        with autograd.pause():
            values = values_of(array)
            if values is None:
                return
            finite = is_finite(values)
            edge = mx.nd.full(values.shape, float(np.finfo(np.float32).max), ctx=values.ctx)
            lowest, highest = mx.nd.where(finite, values, edge).min(), mx.nd.where(finite, values, -edge).max()
            nans = (values != values).sum()
            infs = (1 - finite).sum() - nans
            numbers = mx.nd.concat(lowest, highest, infs, nans, (values == 0).sum(), dim=0)
        shape, dtype = array.shape, dtype_name(array.dtype)

        def read() -> Range:
            lowest, highest, infs, nans, zeros = (float(x) for x in numbers.asnumpy())
            if lowest > highest:  # none is finite
                lowest = highest = math.nan
            return Range(name, shape, dtype, lowest, highest, int(infs), int(nans), int(zeros))

        self._pending.append((observed, read))

    def note_weights(self, weights: Sequence[Weight]) -> None:
        """Record each weight on its first device: its FP32 master if any, then the array that operators read."""
        for weight in weights:
            for array in [*(weight.masters or ())[:1], *weight.arrays[:1]]:  # both empty before the first forward
                self.note(weight.name, array)

    def note_gradients(self, gradients: Sequence[Gradient]) -> None:
        for name, array in gradients:
            self.note(f"the gradient of {name}", array)

    def records(self) -> list[Record]:
        """Return a Record for each tensor, in order of recording. Waits for the device."""
        return [Record(observed, read()) for observed, read in self._pending]
