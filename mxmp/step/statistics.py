"""Running statistics that an overflow cannot poison.
BatchNorm writes its running mean and variance during forward and backward, before anyone can check the step. One inf
in an activation leaves them NaN for ever, and evaluation with them.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .gradients import Gradient, Scalars, concatenated, is_finite, square_sums
from .multi_tensor import FlatCopies, copy_all


class _Watched(NamedTuple):
    """The running statistics on one device, and memory for two copies of their values."""

    ids: list[int]  # of the arrays that the caller passed
    arrays: list[NDArray]
    kept: FlatCopies  # the last finite values
    pending: FlatCopies  # those of the present step, not yet found finite


class RunningStatistics:
    """Keeps a finite copy of each of BatchNorm's running means and variances, to restore them after an overflow.
    Each training step calls ``watch`` and ``sums``; then ``keep`` if all is finite, otherwise ``restore``."""

    def __init__(self) -> None:
        self._seen: list[NDArray] = []  # all that were passed, also those of other dtypes
        self._devices: dict[mx.Context, _Watched] = {}
        self._any_kept = False

    def watch(self, statistics: Sequence[Gradient]) -> RunningStatistics:
        """Watch the FP32 arrays of ``statistics``, name and array on one device; return ``self``.
        Unless all are watched already, copies their values, without an inf or NaN, and waits for the forward."""
        # Arrays that are watched stay so, and nothing is copied anew, when a GAN's discriminator takes steps in which
        # its generator does not run.
        arrays = [item.array for item in statistics]
        if not {*map(id, arrays)} - {*map(id, self._seen)} and (self._any_kept or not self._seen):
            return self
        before = {key: copy for each in self._devices.values() for key, copy in zip(each.ids, each.kept.each)}
        groups: dict[mx.Context, list[Gradient]] = {}
        for item in statistics:
            if item.array.dtype == np.float32:
                groups.setdefault(item.array.ctx, []).append(item)
        self._seen, self._devices = arrays, {}
        for ctx, items in groups.items():
            ids = [id(item.array) for item in items]
            own = [Gradient(item.name, item.array.as_nd_ndarray()) for item in items]
            kept = _finite_copies(own, [before.get(key) for key in ids])
            with autograd.pause():  # a pause keeps autograd from recording the slices
                pending = FlatCopies.like(kept.each)
            self._devices[ctx] = _Watched(ids, [item.array for item in own], kept, pending)
        return self

    def renew(self) -> None:
        """Let the next ``watch`` copy the present values anew: a user may have set them."""
        self._any_kept = False

    def sums(self, after: Scalars) -> Scalars:
        """Copy the statistics for ``keep``; return each device's sum of squares, not finite if a value is not."""
        with autograd.pause():
            for ctx, watched in self._devices.items():
                # A copy waits for the sums of the gradients on its device, and so for the end of the backward:
                # BatchNorm's backward writes the statistics without notifying MXNet's engine.
                done = [array for array, _ in after if array.ctx == ctx]
                last = concatenated(done) if done else None
                copy_all(watched.arrays, watched.pending.each, last)
            return square_sums([Gradient("", watched.pending.flat) for watched in self._devices.values()])

    def keep(self) -> None:
        """Let ``restore`` use the copies of the last ``sums``, which the caller has found finite."""
        self._any_kept = True
        for ctx, each in self._devices.items():
            self._devices[ctx] = each._replace(kept=each.pending, pending=each.kept)

    def restore(self) -> None:
        """Replace each inf or NaN in the statistics by the kept value. Waits for all work on all devices."""
        # BatchNorm's backward writes the statistics without notifying MXNet's engine (in a net hybridized with
        # ``static_shape``). Only after the end of all work is it certain that the write is not still to come.
        if self._devices:
            mx.nd.waitall()
        with autograd.pause():
            for watched in self._devices.values():
                for array, kept in zip(watched.arrays, watched.kept.each):
                    array[:] = _finite_or(array, kept)


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
