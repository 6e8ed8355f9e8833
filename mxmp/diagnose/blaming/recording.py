"""The tensors of a step in the order in which they were made: how large, and how many values are not finite."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

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

__all__ = ["Recording"]


class _PendingRecord(NamedTuple):
    """A tensor, on its way to the host: its lowest and highest finite value, and how many are inf and NaN."""

    observed: Observed | None
    name: str
    shape: tuple[int, ...]
    dtype: str
    numbers: NDArray

    def record(self) -> Record:
        """Return the tensor's record. Synchronizes."""
        lowest, highest, infs, nans = (float(x) for x in self.numbers.asnumpy())
        if lowest > highest:  # none is finite
            lowest = highest = math.nan
        return Record(self.observed, Range(self.name, self.shape, self.dtype, lowest, highest, int(infs), int(nans)))


class Recording:
    """The tensors that were noted, on their way to the host."""

    def __init__(self) -> None:
        self._pending: list[_PendingRecord] = []

    @property
    def has_operators(self) -> bool:
        """Return whether a tensor that an operator made is among them."""
        return any(pending.observed for pending in self._pending)

    def note(self, name: str, array: NDArray, observed: Observed | None = None) -> None:
        """Note one tensor; integers are left out."""
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
            dtype_name = dtype.names[0] if dtype.names else dtype.name
            numbers = mx.nd.concat(lowest, highest, infs, nans, dim=0)
            self._pending.append(_PendingRecord(observed, name, array.shape, dtype_name, numbers))

    def note_observed(self, observed: Observed, array: NDArray) -> None:
        """Note what an operator or an inserted cast made."""
        self.note(observed.label, array, observed)

    def note_weights(self, weights: Sequence[Weight]) -> None:
        """Note the weights of the first device: the master, where there is one, and then what is rounded from it."""
        for weight in weights:
            for array in [*(weight.masters or ())[:1], *weight.arrays[:1]]:  # neither before the first forward
                self.note(weight.name, array)

    def note_gradients(self, gradients: Sequence[Gradient]) -> None:
        """Record the gradients of parameters that the step receives, before it unscales them."""
        for name, array in gradients:
            self.note(f"the gradient of {name}", array)

    def records(self) -> list[Record]:
        """Return all of them in order. Synchronizes."""
        return [pending.record() for pending in self._pending]
