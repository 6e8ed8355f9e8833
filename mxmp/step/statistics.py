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

from ._mxnet import Prepared
from .gradients import FiniteSums, Gradient, Scalars, concatenated, is_finite
from .multi_tensor import FlatCopies, copying


class _Copies:
    """Memory for copies of arrays of one device, and the operators that write and check it in each step."""

    def __init__(self, arrays: Sequence[NDArray]) -> None:
        self._arrays = arrays
        with autograd.pause():  # a pause keeps autograd from recording the slices
            flat, self.each = FlatCopies.like(arrays)
        self._sums = FiniteSums([Gradient("", flat)])
        self._after: NDArray | None = None
        self._copying: list[Prepared] = []

    def renew(self, after: NDArray | None) -> Scalars:
        """Copy the arrays once ``after`` is computed; return a number that is not finite if a value is not."""
        if not self._copying or after is not self._after:
            self._after, self._copying = after, copying(self._arrays, self.each, after)
        for copy in self._copying:
            copy()
        return self._sums()


class _Watched(NamedTuple):
    """The running statistics on one device, and two copies of their values."""

    ids: list[int]  # of the arrays that the caller passed
    arrays: list[NDArray]
    kept: _Copies  # the last finite values
    pending: _Copies  # those of the present step, not yet found finite


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
            copies = _finite_copies(own, [before.get(key) for key in ids])
            watched = [item.array for item in own]
            self._devices[ctx] = _Watched(ids, watched, copies, _Copies(watched))
        return self

    def renew(self) -> None:
        """Let the next ``watch`` copy the present values anew: a user may have set them."""
        self._any_kept = False

    def sums(self, after: Scalars) -> Scalars:
        """Copy the statistics for ``keep``; return each device's sum of squares, not finite if a value is not."""
        found: Scalars = []
        with autograd.pause():
            for ctx, watched in self._devices.items():
                # A copy waits for the sums of the gradients on its device, and so for the end of the backward:
                # BatchNorm's backward writes the statistics without notifying MXNet's engine.
                done = [array for array, _ in after if array.ctx == ctx]
                ((sum_of_squares, _),) = watched.pending.renew(concatenated(done) if done else None)
                found.append((sum_of_squares, [len(found)]))
        return found

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


def _finite_copies(items: Sequence[Gradient], before: Sequence[NDArray | None]) -> _Copies:
    """Return copies in which the kept element replaces each inf or NaN; None stands for BatchNorm's initial value."""
    with autograd.pause():
        copies = _Copies([item.array for item in items])
        for (name, array), kept, copy in zip(items, before, copies.each):
            copy[:] = array  # an earlier backward may still write the array, and it is read only once here
            if kept is None:
                kept = mx.nd.full(array.shape, float(name.endswith("var")), array.ctx)
            copy[:] = _finite_or(copy, kept)
    # The backward that the caller starts next writes the arrays, and MXNet's engine does not know that it does.
    copies.each[0].wait_to_read()
    return copies


def _finite_or(array: NDArray, kept: NDArray) -> NDArray:
    return mx.nd.where(is_finite(array), array, kept)
