"""Running statistics that an overflow cannot poison.

BatchNorm writes its running mean and variance during forward and backward, before anyone can check the step. One inf
in an activation leaves them NaN for ever, and evaluation with them.
"""

from __future__ import annotations

from operator import is_
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .gradients import Gradient, Scalars, is_finite, square_sums
from .multi_tensor import FlatCopies, copy_all

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """Keeps the last finite value of every running statistic that it watches."""

    def __init__(self) -> None:
        self._watched: list[NDArray] = []
        self._devices: dict[mx.Context, list[Gradient]] = {}
        self._pending: dict[mx.Context, FlatCopies] = {}
        self._kept: dict[mx.Context, FlatCopies] = {}

    def watch(self, statistics: Sequence[Gradient]) -> RunningStatistics:
        """Watch the FP32 arrays among these, on all devices, from now on, unless it does already. Returns itself."""
        arrays = [item.array for item in statistics]
        if len(arrays) == len(self._watched) and all(map(is_, arrays, self._watched)):
            return self
        self._watched = arrays
        self._devices = {}
        for name, array in statistics:
            if array.dtype == np.float32:
                self._devices.setdefault(array.ctx, []).append(Gradient(name, array.as_nd_ndarray()))
        self._pending = {ctx: _finite_copies(items) for ctx, items in self._devices.items()}
        self._kept = {ctx: _finite_copies(items) for ctx, items in self._devices.items()}
        return self

    def sums(self, after: Scalars) -> Scalars:
        """Copy the statistics as they are now, and return their sums of squares, one per device.

        ``after``: scalars that depend on all gradients. BatchNorm's backward writes the statistics without notifying
        MXNet's engine, so a copy waits for nothing unless it reads what backward made.
        """
        with autograd.pause():
            for ctx, items in self._devices.items():
                done = [array for array, _ in after if array.ctx == ctx]
                copy_all([item.array for item in items], self._pending[ctx].each, done)
            return square_sums([Gradient("", copies.flat) for copies in self._pending.values()])

    def keep(self) -> None:
        """Remember what ``sums`` copied last, which is finite."""
        self._kept, self._pending = self._pending, self._kept

    def restore(self) -> None:
        """Put back the last finite value of each statistic that is not finite. Synchronizes.

        A net hybridized with ``static_shape`` writes them in backward without notifying MXNet's engine, so only the
        end of all work makes sure that the write has happened.
        """
        if self._devices:
            mx.nd.waitall()
        with autograd.pause():
            for ctx, items in self._devices.items():
                for item, kept in zip(items, self._kept[ctx].each):
                    item.array[:] = _finite_or(item.array, kept)


def _finite_copies(items: Sequence[Gradient]) -> FlatCopies:
    """Return copies of what is finite; the rest falls back to BatchNorm's initial 0 or 1."""
    with autograd.pause():
        copies = FlatCopies.like([item.array for item in items])
        for (name, array), copy in zip(items, copies.each):
            copy[:] = _finite_or(array, mx.nd.full(array.shape, float(name.endswith("var")), array.ctx))
    return copies


def _finite_or(array: NDArray, kept: NDArray) -> NDArray:
    return mx.nd.where(is_finite(array), array, kept)
