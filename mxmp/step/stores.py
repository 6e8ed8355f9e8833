"""Kvstores: those that sum gradients over devices and processes, Horovod, and those that mxmp refuses.
MXNet 1.9.1 trains every worker by itself, silently, if a worker with one device requests a store without "dist" in its
name ("horovod", "DIST_SYNC"), if it does not know the name, and if several workers name a store within the process.
"""

from __future__ import annotations

import itertools
import os
from difflib import get_close_matches
from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..messages import warn_user

# MXNet takes any name with "dist" in it, and "dist_sinc" for "dist_sync".
_DISTRIBUTED = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
_LAUNCHED = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_WITHIN = ("local", "device", "nccl", "local_allreduce_cpu", "local_allreduce_device", "local_update_cpu")
_HOROVOD = (
    'kvstore="horovod" needs Horovod with its MXNet part, which is built on installation, with cmake, g++ and MXNet '
    "installed before: HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation horovod==0.28.1 "
    "(scripts/check_horovod.sh does it, and runs two workers)"
)


def open_store(kvstore: Any) -> Any:
    """Return what to pass to MXNet as ``kvstore`` for the user's, which ``check_kvstore`` accepts: a name or a store.
    Raises ``ValueError`` if MXNet has no such store, ``ImportError`` without Horovod; warns of a store that sums within
    this process if the job has several workers."""
    if isinstance(kvstore, mx.kv.KVStore):
        if kvstore.type == "horovod":
            raise ValueError(
                'mx.kv.create("horovod") of MXNet 1.9.1 makes a store within this process, with rank 0 of 1: pass the '
                'name, kvstore="horovod", and read rank() and size() of horovod.mxnet'
            )
        _refuse_unknown(kvstore.type)
    if not isinstance(kvstore, str):
        return kvstore
    name = kvstore.lower()
    if name == "horovod":
        return Horovod()
    if "dist" not in name and name in mx.kv.KVStoreBase.kv_registry:
        return mx.kv.create(name)
    _refuse_unknown(kvstore)
    if name in _WITHIN:
        _warn_of_other_workers(kvstore)
    return name


def check_kvstore(kvstore: Any, update_on_kvstore: bool | None = None) -> None:
    """Raise ``ValueError`` for a kvstore, by name or object, that updates weights before the check for overflows."""
    if update_on_kvstore:
        raise ValueError(
            "update_on_kvstore=True applies gradients before they are checked, so an overflow would reach the "
            "weights: leave it None or False"
        )
    if not (kvstore is None or isinstance(kvstore, (str, mx.kv.KVStoreBase))):
        raise ValueError(
            f"kvstore must be a name such as 'device' or 'dist_sync', an open kvstore or None, got "
            f"{type(kvstore).__name__}"
            + ("; a scaler is given by name, loss_scale=scaler" if hasattr(kvstore, "adjust") else "")
        )
    kind = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")
    if "async" in kind.lower():
        raise ValueError(
            f"kvstore {kind!r} applies each worker's gradients on the server, before any check: use 'dist_sync'"
        )


def refuse_compression(compression_params: Any) -> None:
    if compression_params is not None:
        raise ValueError(
            f"compression_params={compression_params!r}: 2-bit compression compares scaled gradients with its "
            "threshold, which loses its meaning whenever the scale changes; leave it None (float16 parameters "
            "already halve the traffic)"
        )


def refuse_sparse_weight(name: str, storage: str, cure: str) -> None:
    if storage != "default":
        raise ValueError(
            f"parameter {name!r} has {storage} weights, which MXNet updates on the kvstore only, before any check: "
            f"use dense weights, {cure}"
        )


def is_distributed(store: Any) -> bool:
    """Return whether ``store``, an open kvstore or None, is distributed: has "dist" in its type, or several workers."""
    if store is None:
        return False
    try:
        return "dist" in store.type or store.num_workers > 1
    except NotImplementedError:  # of a store of the user's own class
        return False


def from_rank_zero(store: Any, key: Any, arrays: Sequence[NDArray]) -> None:
    """Set ``arrays``, one per device, to worker 0's first; all workers call it with a ``key`` of their dtype."""
    if isinstance(store, Horovod):
        store.broadcast(key, arrays[0], list(arrays))
        return
    # MXNet's own stores broadcast a key only once. So worker 0 pushes its value and the others push zeros.
    with autograd.pause():
        mine = arrays[0] if store.rank == 0 else mx.nd.zeros_like(arrays[0])
    store.pushpull(key, [mine], out=list(arrays))


class Horovod(mx.kv.KVStoreBase):
    """A kvstore that sums over this worker's devices, and averages over Horovod's workers, who all get the same bits.
    As with ``horovod.mxnet.DistributedTrainer``, ``Trainer.step`` takes the batch size of one worker."""

    type = "horovod"
    _stores = itertools.count()

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(_HOROVOD) from error
        if not hvd.is_initialized():
            hvd.init()
        self._hvd = hvd
        # Horovod matches arrays by name over all workers, who open their stores in one order.
        self._prefix = f"mxmp.{next(self._stores)}"

    @property
    def rank(self) -> int:
        return self._hvd.rank()

    @property
    def num_workers(self) -> int:
        return self._hvd.size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # no updates on the store

    def init(self, key: Any, value: NDArray) -> None:
        """Do nothing: Horovod stores no values. MXNet calls it with each key and the first value for it."""

    def broadcast(self, key: Any, value: NDArray, out: Any, priority: int = 0) -> None:
        first, *others = out if isinstance(out, (list, tuple)) else [out]
        with autograd.pause():
            if first is not value:
                first[:] = value
            self._hvd.broadcast_(first, root_rank=0, name=f"{self._prefix}.broadcast.{key}", priority=priority)
            for other in others:
                first.copyto(other)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Write the average of the sums to ``out``, or to ``value``; ``ValueError`` for a row-sparse array."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        outs = values if out is None else list(out) if isinstance(out, (list, tuple)) else [out]
        if any(array.stype != "default" for array in values):
            raise ValueError(f"{key!r} is {values[0].stype}: Horovod averages dense gradients only (sparse_grad=False)")
        with autograd.pause():
            total = values[0]
            if len(values) > 1:
                total = mx.nd.add_n(*(array.as_in_context(total.ctx) for array in values))
            elif outs[0] is not total:
                total = total.copy()
            share = 1.0 / self.num_workers
            # Division before the sum over workers keeps an average of float16 finite; after it, FP32 rounds less.
            before, after = (share, 1.0) if total.dtype == np.float16 else (1.0, share)
            self._hvd.allreduce_(
                total,
                op=self._hvd.Sum,
                name=f"{self._prefix}.average.{key}",
                priority=priority,
                prescale_factor=before,
                postscale_factor=after,
            )
            for array in outs:
                if array is not total:
                    total.copyto(array)


def refuse_without_launcher(store: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``ValueError`` if ``store``, the name of a distributed kvstore, is to be opened and no launcher has started
    this process; MXNet's error names a variable alone."""
    if isinstance(store, str) and "dist" in store:
        missing = [name for name in _LAUNCHED if not environment.get(name)]
        if missing:
            raise ValueError(
                f"kvstore={store!r} needs a scheduler and servers, and no launcher has started this process "
                f"({', '.join(missing)} not set): python -m mxmp launch --workers 2 -- python train.py, or MXNet's "
                "tools/launch.py; alone, kvstore='device' trains the same"
            )


def _refuse_unknown(kind: str) -> None:
    name = kind.lower()
    if name in (*_WITHIN, *_DISTRIBUTED):
        return
    near = get_close_matches(name, [*_WITHIN, *_DISTRIBUTED, "horovod"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    would = "sum over workers as in 'dist_sync'" if "dist" in name else "silently take one within this process"
    then = "" if "dist" in name else ", so that several workers would train apart"
    raise ValueError(
        f"MXNet 1.9.1 has no kvstore {kind!r} and would {would}{then}: 'device', 'local', 'nccl', 'dist_sync', "
        f"'dist_device_sync', 'horovod' or None{hint}"
    )


def _warn_of_other_workers(kvstore: str, environment: Mapping[str, str] = os.environ) -> None:
    # The launchers of MXNet and Horovod set them to the number of workers.
    for variable, store in (("DMLC_NUM_WORKER", "dist_sync"), ("HOROVOD_SIZE", "horovod")):
        if environment.get(variable, "1") not in ("", "0", "1"):
            warn_user(
                f"{variable}={environment[variable]}: this is one of several workers, and kvstore={kvstore!r} sums "
                f"gradients within it only, so that they train apart: kvstore={store!r} trains one model; None says "
                "that you sum them yourself",
            )
