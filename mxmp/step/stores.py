"""Kvstores: those that sum gradients over devices and processes, those that mxmp refuses, and what workers share.
MXNet 1.9.1 trains every worker by itself, silently, if a worker with one device requests a store without "dist" in its
name ("horovod", "DIST_SYNC"), if it does not know the name, and if several workers name a store within the process.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..messages.callers import warn_user
from ..messages.text import did_you_mean
from .masters import Weight

# Global: the open stores that were tried; a key is initialized once.
_SUMMING: weakref.WeakSet[mx.kv.KVStore] = weakref.WeakSet()

# MXNet takes any name with "dist" in it, and "dist_sinc" for "dist_sync".
_DISTRIBUTED = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
_LAUNCHED = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_WITHIN = ("local", "device", "nccl", "local_allreduce_cpu", "local_allreduce_device", "local_update_cpu")


def open_store(kvstore: Any, key: Any) -> Any:
    """Return what to pass to MXNet as ``kvstore``; warn of one within this process if the job has several workers.
    ``key`` is for a trial of an open store: a number or name, as the caller's keys are. Raises ``ValueError`` if MXNet
    has no such store, it returns no sums, or no launcher serves it, and ``ImportError`` without Horovod."""
    if isinstance(kvstore, mx.kv.KVStore):
        if kvstore.type == "horovod":
            raise ValueError(
                'mx.kv.create("horovod") of MXNet 1.9.1 makes a store within this process, with rank 0 of 1: pass the '
                'name, kvstore="horovod", and read rank() and size() of horovod.mxnet'
            )
        _refuse_unknown(kvstore.type)
        _refuse_without_sums(kvstore, key)
    if not isinstance(kvstore, str):
        return kvstore
    name = kvstore.lower()
    if name == "horovod":
        from .horovod import Horovod

        return Horovod()
    if "dist" not in name and name in mx.kv.KVStoreBase.kv_registry:
        return mx.kv.create(name)
    _refuse_unknown(kvstore)
    if name in _WITHIN:
        _warn_of_other_workers(kvstore)
    else:
        _refuse_without_launcher(name)
    return name


def _refuse_without_sums(store: mx.kv.KVStore, key: Any) -> None:
    """Raise ``ValueError`` if an open store does not sum what it is given; with several workers, all must call it."""
    if store in _SUMMING or store.type == "nccl":  # which takes arrays of GPUs alone
        return
    given = 2.0**-20
    arrays = [mx.nd.full((1,), given, mx.cpu(k)) for k in range(1 if is_distributed(store) else 2)]
    with autograd.pause():
        store.init(key, mx.nd.zeros((1,)))
        store.pushpull(key, arrays)
    if arrays[0].asscalar() != given * len(arrays) * store.num_workers:
        raise ValueError(
            f"the kvstore {store.type!r} does not return the sum of what it is given: it compresses gradients "
            "(set_gradient_compression), at a threshold that is not scaled as they are, or has an optimizer of its own "
            f"(set_optimizer): pass the name, kvstore={store.type!r}"
        )
    _SUMMING.add(store)


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


def _from_rank_zero(store: Any, key: Any, arrays: Sequence[NDArray]) -> None:
    """Set ``arrays``, one per device, to worker 0's first; all workers call it with a ``key`` of their dtype."""
    if store.type == "horovod":
        store.broadcast(key, arrays[0], list(arrays))
        return
    # MXNet's own stores broadcast a key only once. So worker 0 pushes its value and the others push zeros.
    with autograd.pause():
        mine = arrays[0] if store.rank == 0 else mx.nd.zeros_like(arrays[0])
    store.pushpull(key, [mine], out=list(arrays))


def share_initial(kvstore: mx.kv.KVStore, weights: Mapping[Any, Weight], arrays: Sequence[NDArray] = ()) -> None:
    """Send worker 0's weights to all workers, by new keys of ``kvstore``; wait for these weights and for ``arrays``."""
    for key, weight in weights.items():
        source = list(weight.masters or weight.arrays)
        kvstore.broadcast(key, source[0], source)
        if weight.masters:
            weight.masters.round_into(weight.arrays)
    # MXNet's broadcast does not wait. If a worker pushed gradients before the weights had arrived, most runs diverged.
    for array in [*arrays, *(array for weight in weights.values() for array in weight.arrays)]:
        array.wait_to_read()


def share_drawn(kvstore: Any, optimizer: mx.optimizer.Optimizer, weights: Callable[[], Mapping[Any, Weight]]) -> None:
    """Send worker 0's weights to all workers after an update by SGLD; all workers must call it. Does not wait."""
    # SGLD adds another random noise on each worker, so their weights would differ; no other optimizer of MXNet does so.
    if is_distributed(kvstore) and isinstance(optimizer, mx.optimizer.SGLD):
        for key, weight in weights().items():
            _from_rank_zero(kvstore, key, weight.masters or weight.arrays)
            if weight.masters:
                weight.masters.round_into(weight.arrays)


def _refuse_without_launcher(kvstore: str) -> None:
    # MXNet's error names a variable alone.
    missing = [name for name in _LAUNCHED if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"kvstore={kvstore!r} needs a scheduler and servers, and no launcher has started this process "
            f"({', '.join(missing)} not set): python -m mxmp launch --workers 2 -- python train.py, or MXNet's "
            "tools/launch.py; alone, kvstore='device' trains the same"
        )


def _refuse_unknown(kind: str) -> None:
    name = kind.lower()
    if name in (*_WITHIN, *_DISTRIBUTED):
        return
    hint = did_you_mean(name, [*_WITHIN, *_DISTRIBUTED, "horovod"])
    would = "sum over workers as in 'dist_sync'" if "dist" in name else "silently take one within this process"
    then = "" if "dist" in name else ", so that several workers would train apart"
    raise ValueError(
        f"MXNet 1.9.1 has no kvstore {kind!r} and would {would}{then}: 'device', 'local', 'nccl', 'dist_sync', "
        f"'dist_device_sync', 'horovod' or None{hint}"
    )


def _warn_of_other_workers(kvstore: str) -> None:
    # The launchers of MXNet and Horovod set them to the number of workers.
    for variable, store in (("DMLC_NUM_WORKER", "dist_sync"), ("HOROVOD_SIZE", "horovod")):
        if os.environ.get(variable, "1") not in ("", "0", "1"):
            warn_user(
                f"{variable}={os.environ[variable]}: this is one of several workers, and kvstore={kvstore!r} sums "
                f"gradients within it only, so that they train apart: kvstore={store!r} trains one model; None says "
                "that you sum them yourself",
            )
