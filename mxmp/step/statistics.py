"""Running statistics that an overflow cannot poison.

BatchNorm writes its running mean and variance during forward and backward, before anyone can check the
step. One inf in an activation leaves them NaN for ever, and evaluation with them.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .gradients import Gradient, Scalars, is_finite, square_sums

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """Keeps the last finite value of every running statistic that it watches. False while it watches none."""

    def __init__(self) -> None:
        self._watched: list[NDArray] = []
        self._devices: dict[mx.Context, list[Gradient]] = {}
        self._flat: dict[mx.Context, list[NDArray]] = {}
        self._sizes: dict[mx.Context, int] = {}
        self._pending: dict[mx.Context, NDArray] = {}
        self._kept: dict[mx.Context, NDArray] = {}

    def __bool__(self) -> bool:
        return bool(self._watched)

    def watch(self, arrays: Sequence[Gradient]) -> RunningStatistics:
        """Watch these from now on: name and array of every statistic on every device; other than FP32 is left out.

        Nothing happens where they are watched already. Returns itself.
        """
        new = [item.array for item in arrays]
        if len(new) == len(self._watched) and all(a is b for a, b in zip(new, self._watched)):
            return self
        self._watched = new
        self._devices = {}
        for name, array in arrays:
            if array.dtype == np.float32:
                self._devices.setdefault(array.ctx, []).append(Gradient(name, array.as_nd_ndarray()))
        self._flat = {ctx: [i.array.reshape((-1,)) for i in items] for ctx, items in self._devices.items()}
        self._sizes = {ctx: sum(i.array.size for i in items) for ctx, items in self._devices.items()}
        self._kept = {ctx: _sound(self._joined(ctx), items) for ctx, items in self._devices.items()}
        return self

    def sums(self, after: Scalars) -> Scalars:
        """Copy the statistics as they are now; their sums of squares, one per device.

        ``after``: scalars that depend on all gradients. BatchNorm's backward writes the statistics without
        telling MXNet's engine, so a copy waits for nothing unless it reads what backward made.
        """
        with autograd.pause():
            self._pending = {}
            for ctx in self._devices:
                done = [mx.nd.zeros_like(array) for array in after.arrays if array.ctx == ctx]
                self._pending[ctx] = self._joined(ctx, done)
            return square_sums([Gradient("", flat) for flat in self._pending.values()])

    def keep(self) -> None:
        """What ``sums`` copied last is finite: remember it."""
        self._kept, self._pending = self._pending, {}

    def restore(self) -> None:
        """Where a statistic is not finite, put its last finite value back. Synchronizes.

        A net hybridized with ``static_shape`` writes them in backward without telling MXNet's engine, so
        only the end of all work makes sure that the write has happened.
        """
        mx.nd.waitall()
        with autograd.pause():
            for ctx, items in self._devices.items():
                start = 0
                for item in items:
                    size = item.array.size
                    kept = self._kept[ctx][start : start + size].reshape(item.array.shape)
                    finite = is_finite(item.array)
                    item.array[:] = mx.nd.where(finite, item.array, kept)
                    start += size
            self._pending = {}

    def _joined(self, ctx: mx.Context, zeros: Sequence[NDArray] = ()) -> NDArray:
        """All values on a device, one after the other; read after ``zeros`` are there."""
        with autograd.pause():
            return mx.nd.concat(*self._flat[ctx], *zeros, dim=0)[: self._sizes[ctx]]


def _sound(flat: NDArray, items: Sequence[Gradient]) -> NDArray:
    """What is already not finite before the first step falls back to BatchNorm's initial 0 or 1."""
    with autograd.pause():
        initial = [mx.nd.full(i.array.size, float(i.name.endswith("var")), ctx=flat.ctx) for i in items]
        return mx.nd.where(is_finite(flat), flat, mx.nd.concat(*initial, dim=0))
