"""FP32 masters: a float16 array to compute with, an FP32 one to update, save, load and set.

Updates smaller than 2**-11 of a weight vanish in float16 ("Mixed Precision Training", ICLR 2018, section 3.1). MXNet's
``multi_precision`` keeps the FP32 copy in the optimizer's state, made from the already rounded weight, and files then
hold float16. Here the master belongs to the weight: it is updated as any FP32 weight, to the same bits as by
``multi_precision`` for every optimizer of MXNet 1.9.1, and files are FP32 without any trainer.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray


class MasterPair(NamedTuple):
    """A float16 parameter on one device; operators read ``half``: the rounded master, unless a user wrote to it."""

    master: NDArray
    half: NDArray


class Masters(List[NDArray]):
    """The FP32 masters of a weight, one per device, and what a user may have written into its float16 ``arrays``."""

    def __init__(self, masters: Iterable[NDArray] = (), *, exposed: bool = False) -> None:
        super().__init__(masters)
        # Whether a user has the float16 arrays. MXNet does not notify of writes, so they are then compared with the
        # masters at each update or save.
        self.exposed = exposed
        # Copies of the masters from before ``put_back``, until the next update.
        self.before: list[NDArray] | None = None

    def exposed_pairs(self, arrays: Sequence[NDArray]) -> list[MasterPair]:
        """Return the arrays of each device that must be compared with the masters, as a user may have them."""
        return list(map(MasterPair, self, arrays)) if self.exposed else []

    def taken_over(self, arrays: Sequence[NDArray]) -> Masters:
        """Copy into the masters what a user wrote into ``arrays``; return ``self``. Does not wait."""
        for pair in self.exposed_pairs(arrays):
            take_over(*pair)
        return self

    def values(self, arrays: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return what ``taken_over`` returns, in new arrays where a user may have written; change no master."""
        return [take_over(*pair, in_place=False) for pair in self.exposed_pairs(arrays)] or self

    def mean(self, arrays: Sequence[NDArray]) -> NDArray:
        """Return the mean over the devices, a new FP32 array on the CPU: what MXNet saves and exports."""
        copies = [value.copyto(mx.cpu()) for value in self.values(arrays)]
        if len(copies) == 1:
            return copies[0]
        mean = mx.nd.add_n(*(copy.as_nd_ndarray() for copy in copies)) / len(copies)
        return mean.as_np_ndarray() if isinstance(copies[0], mx.np.ndarray) else mean

    def assign(self, value: Any, arrays: Sequence[NDArray]) -> None:
        """Set all masters to ``value``, an NDArray or number, and round them into ``arrays``."""
        self.before = None
        for master in self:
            master.as_nd_ndarray()[:] = value.as_nd_ndarray() if isinstance(value, NDArray) else value
        self.round_into(arrays)

    def put_back(self, value: Any, arrays: Sequence[NDArray]) -> None:
        """Do what ``assign`` does for a user, who may set a copy of ``arrays`` again after an evaluation with averaged
        weights: where ``value`` is a rounded copy of the masters, or of those before, they keep or get FP32 values."""
        with autograd.pause():
            self.before = [master.copy() for master in self] if self.before is None else self.before
        for master, before in zip(self, self.before):
            _put_back(value, master, before)
        self.round_into(arrays)

    def round_into(self, arrays: Sequence[NDArray]) -> None:
        for master, half in zip(self, arrays):
            round_master(master, half)


class Weight(NamedTuple):
    """One parameter on all devices of this worker, for states files, kvstores and diagnostics of both frontends."""

    name: str
    shape: tuple  # 0 for a dimension that is not known before the first forward
    arrays: Sequence[NDArray]  # one per device, not copies; empty before initialization
    masters: Masters | None  # None for an FP32 parameter, or before initialization
    # Writes an FP32 array into arrays and masters, or later, if a Gluon Parameter waits for its shape. Does nothing for
    # a Module's parameter without masters, and for a Gluon Parameter on which ``initialize`` was not called.
    assign: Callable[[NDArray], Any]
    trained: bool = True  # False without a gradient, as running statistics, which differ on devices


def take_over(master: NDArray, half: NDArray, *, in_place: bool = True) -> NDArray:
    """Return ``master`` with each element of ``half`` that differs from the rounded master: a user has written it."""
    full = master.as_nd_ndarray()
    with autograd.pause():
        value = mx.nd.Cast(half.as_nd_ndarray(), dtype="float32")
        found = mx.nd.where(_rounded(master) == value, full, value, out=full if in_place else None)
    return found.as_np_ndarray() if isinstance(master, mx.np.ndarray) else found


def _put_back(value: Any, master: NDArray, before: NDArray) -> None:
    """Set ``master`` to ``value``, or, where this is a rounded copy of ``before`` or ``master``, to that one."""
    value = value.as_nd_ndarray() if isinstance(value, NDArray) else mx.nd.array(value, dtype=value.dtype)
    with autograd.pause():
        is_half = value.dtype == np.float16
        full = value = value.as_in_context(master.ctx).astype("float32")
        for known in (master.as_nd_ndarray(), before.as_nd_ndarray()):
            same = _rounded(known) == value
            # A float16 value is compared element by element; of any other, all elements must be equal.
            if not is_half:
                same = mx.nd.broadcast_like(same.min().reshape((1,) * value.ndim), value)
            full = mx.nd.where(same, known, full)
        master.as_nd_ndarray()[:] = full


def _rounded(master: NDArray) -> NDArray:
    return mx.nd.Cast(mx.nd.Cast(master.as_nd_ndarray(), dtype="float16"), dtype="float32")


def round_master(master: NDArray, half: NDArray) -> None:
    with autograd.pause():
        mx.nd.Cast(master.as_nd_ndarray(), dtype=np.dtype(half.dtype).name, out=half.as_nd_ndarray())
