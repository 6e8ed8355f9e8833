"""The private attributes of MXNet's that the Symbolic frontend uses. A test holds each against 1.9.1.

Subclasses of MXNet's classes (``Module``, ``BucketingModule``) also use inherited ones, listed in ``INHERITED``.
"""

from __future__ import annotations

from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Iterator

import mxnet as mx

INHERITED = {
    "Module": (
        "_arg_params _aux_params _compression_params _context _data_names _exec_group _grad_req _group2ctxs _kvstore "
        "_label_names _optimizer _param_names _params_dirty _preload_opt_states _state_names _symbol "
        "_sync_params_from_devices _updater"
    ),
    "BucketingModule": (
        "_buckets _call_sym_gen _compression_params _context _curr_module _default_bucket_key _fixed_param_names "
        "_group2ctxs _monitor _params_dirty _reset_bind _state_names _work_load_list"
    ),
}


@contextmanager
def without_optimizer(kvstore: Any, devices: int) -> Iterator[Any]:
    """Yield what to pass as ``kvstore`` to ``mx.mod.Module.init_optimizer``, so that no kvstore updates the weights."""
    if isinstance(kvstore, str) and (devices > 1 or "dist" in kvstore):
        kvstore = mx.kv.create(kvstore)
    if not isinstance(kvstore, mx.kv.KVStoreBase):
        yield kvstore
        return
    # The kvstore would update the weights before mxmp could check the gradients.
    kvstore.is_capable = lambda capability: False
    try:
        yield kvstore
    finally:
        del kvstore.is_capable


def number_weights_plainly(optimizer: mx.optimizer.Optimizer, names: list[str], devices: int) -> None:
    """Let ``idx2name`` have one index for all devices, unless the user has filled it."""
    by_device = {i * devices + k: name for i, name in enumerate(names) for k in range(devices)}
    if optimizer.idx2name == by_device:
        optimizer.idx2name = dict(enumerate(names))


def group(module: mx.mod.Module) -> Any:
    """Return a module's executors; the frame of this function tells the module that not a user reads them."""
    return module._exec_group


# Of a BucketingModule, the module of the current bucket and the ``mx.mon.Monitor``; of an executor, its Symbol.
current, monitor_of = attrgetter("_curr_module"), attrgetter("_monitor")
symbol_of = attrgetter("_symbol")
