"""FP32 masters: a float16 array to compute with, an FP32 one to update, save, load and set.

Updates smaller than 2**-11 of a weight vanish in float16 ("Mixed Precision Training", ICLR 2018, section 3.1). MXNet's
``multi_precision`` keeps the FP32 copy in the optimizer's state, made from the already rounded weight, and files then
hold float16. Here the master belongs to the weight: the optimizer updates it as it updates any FP32 weight (the same
bits as ``multi_precision`` for every optimizer of MXNet 1.9.1), and files are FP32 without any trainer.
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

__all__ = [
    "MasterPair",
    "Weight",
    "assign",
    "distances",
    "publish",
    "share_drawn",
    "share_initial",
    "take_over",
]


class Weight(NamedTuple):
    """One parameter on every device of this worker, as files and other workers see it."""

    name: str
    shape: tuple  # 0 where it is not known yet
    arrays: Sequence[NDArray]  # those that compute, one per device; empty before initialization
    masters: Sequence[NDArray] | None  # FP32, one per device
    assign: Callable[[NDArray], Any]  # makes an FP32 array the value on every device

    def publish(self) -> None:
        """Round the masters, if there are some, into the arrays that compute."""
        for master, array in zip(self.masters or (), self.arrays):
            publish(master, array)


class MasterPair(NamedTuple):
    """An FP32 master, and the float16 array on the same device that computes with its rounded value."""

    master: NDArray
    low: NDArray


def distances(pairs: Sequence[MasterPair]) -> Scalars:
    """Return for each pair a number that is 0 if the array holds the rounded master, and only then. Does not wait.

    The number is the sum of squared differences. Where two float16 numbers differ, they do so by 2**-24 at least, and
    2**-48 is a normal FP32 number, so no such sum is 0. An inf or NaN in either array makes it NaN. It needs 6 bytes an
    element, at a time when the memory of forward and backward is free.
    """
    devices: dict[mx.Context, list[int]] = {}
    for i, pair in enumerate(pairs):
        devices.setdefault(pair.low.ctx, []).append(i)
    found: Scalars = []
    with autograd.pause():
        for members in devices.values():
            masters = [pairs[i].master.as_nd_ndarray() for i in members]
            arrays = [pairs[i].low.as_nd_ndarray() for i in members]
            copies = FlatCopies.like(masters)
            copy_all(masters, copies.each)
            rounded = FlatCopies.like(arrays, mx.nd.Cast(copies.flat, dtype="float16"))
            subtract_all(rounded.each, arrays)
            mx.nd.Cast(rounded.flat, dtype="float32", out=copies.flat)
            found.append((mx.nd.multi_sum_sq(*copies.each, num_arrays=len(members)), members))
    return found


def take_over(master: NDArray, low: NDArray) -> None:
    """Copy into the master each element of ``low`` that is not the rounded master's: a user wrote it. Does not wait."""
    master, low = master.as_nd_ndarray(), low.as_nd_ndarray()
    with autograd.pause():
        value = mx.nd.Cast(low, dtype="float32")
        rounded = mx.nd.Cast(mx.nd.Cast(master, dtype=np.dtype(low.dtype).name), dtype="float32")
        mx.nd.where(rounded == value, master, value, out=master)


def publish(master: NDArray, low: NDArray) -> None:
    """Round the master into the array that computes. Does not wait."""
    with autograd.pause():
        mx.nd.Cast(master.as_nd_ndarray(), dtype=np.dtype(low.dtype).name, out=low.as_nd_ndarray())


def assign(value: NDArray, masters: Sequence[NDArray], arrays: Sequence[NDArray]) -> None:
    """Make ``value`` the master on every device, and round it into what computes there."""
    for master, low in zip(masters, arrays):
        master.as_nd_ndarray()[:] = value.as_nd_ndarray() if isinstance(value, NDArray) else value
        publish(master, low)


def share_initial(kvstore: mx.kv.KVStore, weights: Mapping[Any, Weight], arrays: Sequence[NDArray] = ()) -> None:
    """Send rank 0's ``weights``, by keys that the kvstore does not know, and wait for them. Synchronizes.

    MXNet broadcasts without waiting, and workers that pushed gradients before diverged in most runs. ``arrays`` are
    waited for, too: they are being sent already.
    """
    for key, weight in weights.items():
        source = list(weight.masters or weight.arrays)
        kvstore.broadcast(key, source[0], source)
        weight.publish()
    for array in [*arrays, *(array for weight in weights.values() for array in weight.arrays)]:
        array.wait_to_read()


def share_drawn(kvstore: Any, optimizer: mx.optimizer.Optimizer, weights: Callable[[], Mapping[Any, Weight]]) -> None:
    """Send rank 0's weights to all workers after an update with random numbers. Does not wait.

    Of MXNet's optimizers SGLD draws, on every worker another noise; MXNet's own Trainer draws once, on the server.
    ``weights`` returns them by a key that ``kvstore`` knows in FP32.
    """
    if is_distributed(kvstore) and isinstance(optimizer, mx.optimizer.SGLD):
        for key, weight in weights().items():
            from_rank_zero(kvstore, key, weight.masters or weight.arrays)
            weight.publish()
