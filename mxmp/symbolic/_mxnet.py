"""The private attributes of MXNet's that the Symbolic frontend uses. A test holds each against 1.9.1.

Subclasses of MXNet's classes (``Module``, ``BucketingModule``) also use inherited ones, listed in ``INHERITED``.
"""

from __future__ import annotations

from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Callable, Iterator

import mxnet as mx

from ..precision.monitoring import NetworkView, in_full
from ..precision.plan import Plan

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


class Monitored:
    """Wraps an executor so that a ``mx.mon.Monitor`` sees the user's FP32 network, without the casts that run in it."""

    def __init__(self, executor: mx.executor.Executor, symbol: mx.sym.Symbol, plan: Plan) -> None:
        self._executor = executor
        self._symbol = symbol
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Let ``callback(name, handle)`` get the tensors of the user's operators, in FP32; it must free each handle."""
        view = NetworkView(symbol_of(self._executor), self._plan)
        self._executor.set_monitor_callback(view.translated(callback), monitor_all)

    @property
    def arg_arrays(self) -> list[mx.nd.NDArray]:
        return [in_full(self._executor.arg_dict[name]) for name in self._symbol.list_arguments()]

    @property
    def aux_arrays(self) -> list[mx.nd.NDArray]:
        return [in_full(self._executor.aux_dict[name]) for name in self._symbol.list_auxiliary_states()]
