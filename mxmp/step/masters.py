"""FP32 masters: a float16 array to compute with, an FP32 one to update, save, load and set.

Updates smaller than 2**-11 of a weight vanish in float16 ("Mixed Precision Training", ICLR 2018, section 3.1). MXNet's
``multi_precision`` keeps the FP32 copy in the optimizer's state, made from the already rounded weight, and files then
hold float16. Here the master belongs to the weight: it is updated as any FP32 weight, to the same bits as by
``multi_precision`` for every optimizer of MXNet 1.9.1, and files are FP32 without any trainer.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .gradients import Scalars
from .multi_tensor import FlatCopies, copy_all, subtract_all
from .stores import from_rank_zero, is_distributed


class Weight(NamedTuple):
    """One parameter on all devices of this worker, for states files, kvstores and diagnostics of both frontends."""

    name: str
    shape: tuple  # 0 for a dimension that is not known before the first forward
    arrays: Sequence[NDArray]  # one per device, not copies; empty before initialization
    masters: Sequence[NDArray] | None  # FP32, one per device; None for an FP32 parameter, or before initialization
    # Writes an FP32 array into arrays and masters, or later, if a Gluon Parameter waits for its shape. Does nothing for
    # a Module's parameter without masters, and for a Gluon Parameter on which ``initialize`` was not called.
    assign: Callable[[NDArray], Any]
    trained: bool = True  # False without a gradient, as running statistics, which differ on devices

    def round_masters(self) -> None:
        for master, array in zip(self.masters or (), self.arrays):
            round_master(master, array)


class MasterPair(NamedTuple):
    """A float16 parameter on one device; operators read ``half``: the rounded master, unless a user wrote to it."""

    master: NDArray
    half: NDArray


def distances(pairs: Sequence[MasterPair]) -> Scalars:
    """Return one number per pair: 0 if ``half`` is the rounded master; inf or NaN if an array has one."""
    devices: dict[mx.Context, list[int]] = {}
    for i, pair in enumerate(pairs):
        devices.setdefault(pair.half.ctx, []).append(i)
    found: Scalars = []
    # The sum of squared differences. Different float16 numbers differ by at least 2**-24, and 2**-48 is a normal FP32
    # number, so the sum for different arrays is never 0. Takes 6 bytes of memory per element for a short time.
    with autograd.pause():
        for members in devices.values():
            masters = [pairs[i].master.as_nd_ndarray() for i in members]
            arrays = [pairs[i].half.as_nd_ndarray() for i in members]
            copies = FlatCopies.like(masters)
            copy_all(masters, copies.each)
            rounded = FlatCopies.like(arrays, mx.nd.Cast(copies.flat, dtype="float16"))
            subtract_all(rounded.each, arrays)
            mx.nd.Cast(rounded.flat, dtype="float32", out=copies.flat)
            found.append((mx.nd.multi_sum_sq(*copies.each, num_arrays=len(members)), members))
    return found


def take_over(master: NDArray, half: NDArray) -> None:
    """Copy what a user has written into ``half`` into ``master``, in place."""
    _taken_over(master, half, out=master.as_nd_ndarray())


def taken_over(master: NDArray, half: NDArray) -> NDArray:
    """Return ``master`` with each element of ``half`` that differs from the rounded master: a user has written it."""
    full = _taken_over(master, half)
    return full.as_np_ndarray() if isinstance(master, mx.np.ndarray) else full


def _taken_over(master: NDArray, half: NDArray, out: NDArray | None = None) -> NDArray:
    with autograd.pause():
        value = mx.nd.Cast(half.as_nd_ndarray(), dtype="float32")
        return mx.nd.where(_rounded(master) == value, master.as_nd_ndarray(), value, out=out)


def put_back(value: Any, master: NDArray, half: NDArray, before: NDArray) -> None:
    """Set ``master`` to the array ``value``, and round it into ``half``.
    Where ``value`` is a rounded copy of ``before`` or ``master``, the master gets the FP32 values of that one."""
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
    round_master(master, half)


def _rounded(master: NDArray) -> NDArray:
    return mx.nd.Cast(mx.nd.Cast(master.as_nd_ndarray(), dtype="float16"), dtype="float32")


def round_master(master: NDArray, half: NDArray) -> None:
    with autograd.pause():
        mx.nd.Cast(master.as_nd_ndarray(), dtype=np.dtype(half.dtype).name, out=half.as_nd_ndarray())


def assign(value: NDArray, masters: Sequence[NDArray], arrays: Sequence[NDArray]) -> None:
    """Set all masters to ``value``, an NDArray or number, and round them into ``arrays``; no masters: do nothing."""
    for master, half in zip(masters, arrays):
        master.as_nd_ndarray()[:] = value.as_nd_ndarray() if isinstance(value, NDArray) else value
        round_master(master, half)


def share_initial(kvstore: mx.kv.KVStore, weights: Mapping[Any, Weight], arrays: Sequence[NDArray] = ()) -> None:
    """Send worker 0's weights to all workers, by new keys of ``kvstore``; wait for these weights and for ``arrays``."""
    for key, weight in weights.items():
        source = list(weight.masters or weight.arrays)
        kvstore.broadcast(key, source[0], source)
        weight.round_masters()
    # MXNet's broadcast does not wait. If a worker pushed gradients before the weights had arrived, most runs diverged.
    for array in [*arrays, *(array for weight in weights.values() for array in weight.arrays)]:
        array.wait_to_read()


def share_drawn(kvstore: Any, optimizer: mx.optimizer.Optimizer, weights: Callable[[], Mapping[Any, Weight]]) -> None:
    """Send worker 0's weights to all workers after an update by SGLD; all workers must call it. Does not wait."""
    # SGLD adds another random noise on each worker, so their weights would differ; no other optimizer of MXNet does so.
    if is_distributed(kvstore) and isinstance(optimizer, mx.optimizer.SGLD):
        for key, weight in weights().items():
            from_rank_zero(kvstore, key, weight.masters or weight.arrays)
            weight.round_masters()
