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


class Weight(NamedTuple):
    """One parameter: its arrays on all devices of this worker, its FP32 masters, and a function that sets its value.

    States files, kvstores and diagnostics use it, so that these work alike for Gluon and Module.

    Attributes
    ----------
    name, shape
        Of the parameter (``"fc1_weight"``); 0 stands for a dimension that is not known before the first forward.
    arrays : sequence of NDArray
        The parameter's own arrays, one per device, not copies; float16 if it has masters. Empty before initialization.
    masters : sequence of NDArray or None
        The FP32 master weights, one per device; None if the parameter has none (as every FP32 parameter) or is not
        initialized.
    assign : callable
        Takes an FP32 array and writes it into the arrays on every device, and into the masters, if there are any. A
        Gluon Parameter that waits for its shape is initialized with it later. Does nothing for a Module's parameter
        without masters, and for a Gluon Parameter on which ``initialize`` was not called.
    trained : bool
        False for a Gluon Parameter without a gradient, such as running statistics, which differ from device to device.
    """

    name: str
    shape: tuple
    arrays: Sequence[NDArray]
    masters: Sequence[NDArray] | None
    assign: Callable[[NDArray], Any]
    trained: bool = True

    def round_masters(self) -> None:
        """Write the FP32 masters, if there are any, rounded to float16, into ``arrays``. Does not wait for a device."""
        for master, array in zip(self.masters or (), self.arrays):
            round_master(master, array)


class MasterPair(NamedTuple):
    """The arrays of a float16 parameter on one device: the FP32 ``master``, which the optimizer updates, and ``half``.

    Operators read ``half``: the master, rounded, unless a user has written into it.
    """

    master: NDArray
    half: NDArray


def distances(pairs: Sequence[MasterPair]) -> Scalars:
    """Return one number per pair, on its device: for finite arrays 0 if, and only if, ``half`` is the rounded master.

    If they differ, a user has written into ``half``. If an array of the pair has an inf or NaN, the number is inf or
    NaN. ``fetch`` takes the result, and copies the numbers to the host in the order of ``pairs``. Does not wait for a
    device.

    The number is the sum of squared differences in FP32. Two different float16 numbers differ by at least 2**-24, and
    2**-48 is a normal FP32 number, so the sum for different arrays is never 0. Takes 6 bytes of memory per element for
    a short time.
    """
    devices: dict[mx.Context, list[int]] = {}
    for i, pair in enumerate(pairs):
        devices.setdefault(pair.half.ctx, []).append(i)
    found: Scalars = []
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
    """Set ``master`` in place to what ``taken_over`` returns. Does not wait for the device."""
    _taken_over(master, half, out=master.as_nd_ndarray())


def taken_over(master: NDArray, half: NDArray) -> NDArray:
    """Return ``master`` with each element of ``half`` that differs from the rounded master. Does not wait.

    Such an element was written by a user. All other elements have the FP32 values of the master.
    """
    full = _taken_over(master, half)
    return full.as_np_ndarray() if isinstance(master, mx.np.ndarray) else full


def _taken_over(master: NDArray, half: NDArray, out: NDArray | None = None) -> NDArray:
    with autograd.pause():
        value = mx.nd.Cast(half.as_nd_ndarray(), dtype="float32")
        return mx.nd.where(_rounded(master) == value, master.as_nd_ndarray(), value, out=out)


def put_back(value: Any, master: NDArray, half: NDArray, before: NDArray) -> None:
    """Set ``master`` to ``value``, an array, or to what ``value`` is a rounded copy of; round it into ``half``.

    If all of ``value`` equals the rounded ``before`` or the rounded ``master``, the master gets the FP32 values of that
    one; a float16 ``value`` is compared element by element. Does not wait for the device.
    """
    value = value.as_nd_ndarray() if isinstance(value, NDArray) else mx.nd.array(value, dtype=value.dtype)
    with autograd.pause():
        is_half = value.dtype == np.float16
        full = value = value.as_in_context(master.ctx).astype("float32")
        for known in (master.as_nd_ndarray(), before.as_nd_ndarray()):
            same = _rounded(known) == value
            if not is_half:
                same = mx.nd.broadcast_like(same.min().reshape((1,) * value.ndim), value)
            full = mx.nd.where(same, known, full)
        master.as_nd_ndarray()[:] = full
    round_master(master, half)


def _rounded(master: NDArray) -> NDArray:
    """Return an FP32 array of the values of ``master`` rounded to float16."""
    return mx.nd.Cast(mx.nd.Cast(master.as_nd_ndarray(), dtype="float16"), dtype="float32")


def round_master(master: NDArray, half: NDArray) -> None:
    """Write the FP32 ``master``, rounded to float16, into ``half``, the array that operators read. Does not wait."""
    with autograd.pause():
        mx.nd.Cast(master.as_nd_ndarray(), dtype=np.dtype(half.dtype).name, out=half.as_nd_ndarray())


def assign(value: NDArray, masters: Sequence[NDArray], arrays: Sequence[NDArray]) -> None:
    """Set the master on every device to ``value``, an NDArray or number, and round each master into its float16 array.

    ``masters`` and ``arrays`` have one array per device, in the same order. With empty ``masters`` nothing is set.
    """
    for master, half in zip(masters, arrays):
        master.as_nd_ndarray()[:] = value.as_nd_ndarray() if isinstance(value, NDArray) else value
        round_master(master, half)


def share_initial(kvstore: mx.kv.KVStore, weights: Mapping[Any, Weight], arrays: Sequence[NDArray] = ()) -> None:
    """Send the weights of worker 0 to all workers at the start of training; wait until this worker has received them.

    MXNet's broadcast does not wait. If a worker pushed gradients before the weights had arrived, most runs diverged.
    ``weights`` has each weight by a key that ``kvstore`` does not know yet; masters are sent in FP32 and then rounded
    into the float16 arrays. ``arrays`` are further arrays to wait for, which MXNet itself has begun to send.
    """
    for key, weight in weights.items():
        source = list(weight.masters or weight.arrays)
        kvstore.broadcast(key, source[0], source)
        weight.round_masters()
    for array in [*arrays, *(array for weight in weights.values() for array in weight.arrays)]:
        array.wait_to_read()


def share_drawn(kvstore: Any, optimizer: mx.optimizer.Optimizer, weights: Callable[[], Mapping[Any, Weight]]) -> None:
    """Send the weights of worker 0 to all workers if the optimizer is SGLD and the job is distributed; else do nothing.

    Every worker must call it after each update that is not skipped. SGLD adds random noise to its updates, a different
    one on each worker, so the workers' weights would differ; no other optimizer of MXNet does so. ``weights()`` returns
    the weights by their keys in ``kvstore``, where each key was initialized with an FP32 array. Masters are sent in
    FP32 and then rounded into the float16 arrays. Does not wait.
    """
    if is_distributed(kvstore) and isinstance(optimizer, mx.optimizer.SGLD):
        for key, weight in weights().items():
            from_rank_zero(kvstore, key, weight.masters or weight.arrays)
            weight.round_masters()
