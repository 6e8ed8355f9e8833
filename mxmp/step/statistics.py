"""Running statistics that an overflow cannot poison.
BatchNorm writes its running mean and variance during forward and backward, before anyone can check the step. One inf
in an activation leaves them NaN for ever, and evaluation with them.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .gradients import Gradient, Scalars, concatenated, is_finite, square_sums
from .multi_tensor import FlatCopies, copy_all


class RunningStatistics:
    """Keeps a finite copy of each of BatchNorm's running means and variances, to restore them after an overflow.
    Each training step calls ``watch`` and ``sums``; then ``keep`` if all is finite, otherwise ``restore``."""

    def __init__(self) -> None:
        self._watched: list[NDArray] = []
        self._devices: dict[mx.Context, list[Gradient]] = {}
        self._keys: dict[mx.Context, list[int]] = {}  # ``id`` of the array of each item in ``_devices``
        self._pending: dict[mx.Context, FlatCopies] = {}
        self._kept: dict[mx.Context, FlatCopies] = {}
        self._any_kept = False

    def watch(self, statistics: Sequence[Gradient]) -> RunningStatistics:
        """Watch the FP32 arrays of ``statistics``, name and array on one device; return ``self``.
        Unless all are watched already, copies their values, without an inf or NaN, and waits for the forward."""
        # Arrays that are watched stay so, and nothing is copied anew, when a GAN's discriminator takes steps in which
        # its generator does not run.
        arrays = [item.array for item in statistics]
        if not {*map(id, arrays)} - {*map(id, self._watched)} and (self._any_kept or not self._watched):
            return self
        kept = {key: copy for ctx, keys in self._keys.items() for key, copy in zip(keys, self._kept[ctx].each)}
        self._watched, self._devices, self._keys = arrays, {}, {}
        for name, array in statistics:
            if array.dtype == np.float32:
                self._devices.setdefault(array.ctx, []).append(Gradient(name, array.as_nd_ndarray()))
                self._keys.setdefault(array.ctx, []).append(id(array))
        before = {ctx: [kept.get(key) for key in keys] for ctx, keys in self._keys.items()}
        self._kept = {ctx: _finite_copies(items, before[ctx]) for ctx, items in self._devices.items()}
        with autograd.pause():  # a pause keeps autograd from recording the slices
            self._pending = {ctx: FlatCopies.like(copies.each) for ctx, copies in self._kept.items()}
        return self

    def renew(self) -> None:
        """Let the next ``watch`` copy the present values anew: a user may have set them."""
        self._any_kept = False

    def sums(self, after: Scalars) -> Scalars:
        """Copy the statistics for ``keep``; return each device's sum of squares, not finite if a value is not."""
        with autograd.pause():
            for ctx, items in self._devices.items():
                # A copy waits for the sums of the gradients on its device, and so for the end of the backward:
                # BatchNorm's backward writes the statistics without notifying MXNet's engine.
                done = [array for array, _ in after if array.ctx == ctx]
                last = concatenated(done) if done else None
                copy_all([item.array for item in items], self._pending[ctx].each, last)
            return square_sums([Gradient("", copies.flat) for copies in self._pending.values()])

    def keep(self) -> None:
        """Let ``restore`` use the copies of the last ``sums``, which the caller has found finite."""
        self._any_kept = True
        self._kept, self._pending = self._pending, self._kept

    def restore(self) -> None:
        """Replace each inf or NaN in the statistics by the kept value. Waits for all work on all devices."""
        # BatchNorm's backward writes the statistics without notifying MXNet's engine (in a net hybridized with
        # ``static_shape``). Only after the end of all work is it certain that the write is not still to come.
        if self._devices:
            mx.nd.waitall()
        with autograd.pause():
            for ctx, items in self._devices.items():
                for item, kept in zip(items, self._kept[ctx].each):
                    item.array[:] = _finite_or(item.array, kept)


def _finite_copies(items: Sequence[Gradient], before: Sequence[NDArray | None]) -> FlatCopies:
    """Return copies in which the kept element replaces each inf or NaN; None stands for BatchNorm's initial value."""
    with autograd.pause():
        copies = FlatCopies.like([item.array for item in items])
        for (name, array), kept, copy in zip(items, before, copies.each):
            copy[:] = array  # an earlier backward may still write the array, and it is read only once here
            if kept is None:
                kept = mx.nd.full(array.shape, float(name.endswith("var")), array.ctx)
            copy[:] = _finite_or(copy, kept)
    # The backward that the caller starts next writes the arrays, and MXNet's engine does not know that it does.
    copies.flat.wait_to_read()
    return copies


def _finite_or(array: NDArray, kept: NDArray) -> NDArray:
    return mx.nd.where(is_finite(array), array, kept)
