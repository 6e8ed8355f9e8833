"""Records how large the tensors of a step are, in the order in which they are computed, and which are not finite."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...observed import Observed
from ...probe import values_of
from ...step.gradients import Gradient, is_finite
from ...step.masters import Weight
from .report import Range
from .verdict import Record


class Recording:
    """The value ranges of the tensors of one step, with the operators that made them, in the order of recording.

    A range is the lowest and the highest finite value, and the numbers of infs and NaNs. ``blame`` makes a Recording of
    the step that it replays, and ``guard`` one of each step that it looks into.
    """

    def __init__(self) -> None:
        # Each with a function that waits for the range, which is still being computed on its device.
        self._pending: list[tuple[Observed | None, Callable[[], Range]]] = []

    @property
    def has_operators(self) -> bool:
        """Return whether ``note_observed`` has recorded a tensor, which an operator of the network or a cast made."""
        return any(observed for observed, _ in self._pending)

    def note(self, name: str, array: NDArray, observed: Observed | None = None) -> None:
        """Record the range of one tensor; do nothing for an integer or empty array. Waits only for a sparse array.

        ``name`` is what reports call the tensor, such as ``"fc1"`` or ``"the loss"``. ``observed`` says which operator
        of the network, or cast by mxmp, made it. It is None for an input, a parameter, the loss, and the gradient of a
        parameter or of the loss.
        """
        with autograd.pause():
            values = values_of(array)
            if values is None:
                return
            finite = is_finite(values)
            edge = mx.nd.full(values.shape, float(np.finfo(np.float32).max), ctx=values.ctx)
            lowest, highest = mx.nd.where(finite, values, edge).min(), mx.nd.where(finite, values, -edge).max()
            nans = (values != values).sum()
            infs = (1 - finite).sum() - nans
            numbers = mx.nd.concat(lowest, highest, infs, nans, dim=0)
        shape, dtype = array.shape, np.dtype(array.dtype)

        def read() -> Range:
            lowest, highest, infs, nans = (float(x) for x in numbers.asnumpy())
            if lowest > highest:  # none is finite
                lowest = highest = math.nan
            dtype_name = dtype.names[0] if dtype.names else dtype.name
            return Range(name, shape, dtype_name, lowest, highest, int(infs), int(nans))

        self._pending.append((observed, read))

    def note_observed(self, observed: Observed, array: NDArray) -> None:
        """Record a tensor that a probe reports, made by the operator or mxmp's cast that ``observed`` describes."""
        self.note(observed.label, array, observed)

    def note_weights(self, weights: Sequence[Weight]) -> None:
        """Record each weight on its first device: its FP32 master if it has one, then the array that operators read.

        With a master, that array is the master rounded to float16. A weight whose shape is not known yet is left out.
        """
        for weight in weights:
            for array in [*(weight.masters or ())[:1], *weight.arrays[:1]]:  # both empty before the first forward
                self.note(weight.name, array)

    def note_gradients(self, gradients: Sequence[Gradient]) -> None:
        """Record the gradient of each parameter on each device, under the name ``"the gradient of fc_weight"``."""
        for name, array in gradients:
            self.note(f"the gradient of {name}", array)

    def records(self) -> list[Record]:
        """Return one Record (``observed`` and Range) for each tensor, in order of recording. Waits for the device."""
        return [Record(observed, read()) for observed, read in self._pending]
