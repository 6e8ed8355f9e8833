"""The tensors of a step in the order in which they were made: how large, and how many values are not finite."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...step.gradients import Gradient, is_finite
from ...step.masters import Weight
from ..watching.taps import values_of
from ..watching.wiring import Seen
from .report import Range
from .verdict import Met

__all__ = ["Recording"]


class Recording:
    """What was noted, on its way to the host."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []

    @property
    def of_operators(self) -> bool:
        """Whether something that an operator made is among it."""
        return any(taken.seen for taken in self._taken)

    def note(self, name: str, array: NDArray, seen: Seen | None = None) -> None:
        with autograd.pause():
            values = values_of(array)
            if values is None:
                return
            finite = is_finite(values)
            edge = mx.nd.full(values.shape, float(np.finfo(np.float32).max), ctx=values.ctx)
            lowest, highest = mx.nd.where(finite, values, edge).min(), mx.nd.where(finite, values, -edge).max()
            nans = (values != values).sum()
            infs = (1 - finite).sum() - nans
            dtype = np.dtype(array.dtype)
            numbers = mx.nd.concat(lowest, highest, infs, nans, dim=0)
            self._taken.append(_Taken(seen, name, array.shape, dtype.names[0] if dtype.names else dtype.name, numbers))

    def note_weights(self, weights: Sequence[Weight]) -> None:
        """Of the first device: the master, where there is one, and then what is rounded from it and computes."""
        for weight in weights:
            for array in [*(weight.masters or ())[:1], *weight.arrays[:1]]:  # neither before the first forward
                self.note(weight.name, array)

    def note_gradients(self, gradients: Sequence[Gradient]) -> None:
        """Of parameters, as the step gets them."""
        for name, array in gradients:
            self.note(f"the gradient of {name}", array)

    def met(self) -> list[Met]:
        """All of it. Synchronizes."""
        return [taken.met() for taken in self._taken]


class _Taken(NamedTuple):
    """A tensor, on its way to the host: its lowest and highest finite value, and how many are inf and NaN."""

    seen: Seen | None
    name: str
    shape: tuple[int, ...]
    dtype: str
    numbers: NDArray

    def met(self) -> Met:
        lowest, highest, infs, nans = (float(x) for x in self.numbers.asnumpy())
        if lowest > highest:  # none is finite
            lowest = highest = math.nan
        return Met(self.seen, Range(self.name, self.shape, self.dtype, lowest, highest, int(infs), int(nans)))
