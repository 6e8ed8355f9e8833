"""The private attributes of MXNet's that the Symbolic frontend uses. A test holds each against 1.9.1.

Subclasses of MXNet's classes (``Module``, ``BucketingModule``) also use inherited ones, listed in ``INHERITED``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import mxnet as mx

from ..callbacks import hold_interrupts
from ..precision.monitoring import NetworkView, in_full
from ..precision.plan import Plan

__all__ = [
    "INHERITED",
    "Monitored",
    "number_weights_plainly",
    "symbol_of",
    "twin",
    "without_optimizer",
]

INHERITED = {
    "Module": (
        "_arg_params _aux_params _compression_params _context _exec_group _grad_req _group2ctxs _kvstore _optimizer "
        "_param_names _params_dirty _preload_opt_states _symbol _sync_params_from_devices _updater"
    ),
    "BucketingModule": (
        "_buckets _call_sym_gen _compression_params _context _curr_module _default_bucket_key _fixed_param_names "
        "_group2ctxs _monitor _params_dirty _reset_bind _state_names _work_load_list"
    ),
}


@contextmanager
def without_optimizer(kvstore: Any, devices: int) -> Iterator[Any]:
    """Yield the kvstore that Module would make of a name; within the block it says that it runs no optimizer.

    Otherwise Module lets the store update, dist_sync's servers included.
    """
    if isinstance(kvstore, str) and (devices > 1 or "dist" in kvstore):
        kvstore = mx.kv.create(kvstore)
    if not isinstance(kvstore, mx.kv.KVStoreBase):
        yield kvstore
        return
    kvstore.is_capable = lambda capability: False
    try:
        yield kvstore
    finally:
        del kvstore.is_capable


def number_weights_plainly(optimizer: mx.optimizer.Optimizer, names: list[str], devices: int) -> None:
    """Number weight ``i`` as ``i`` on every device.

    Without updates on the kvstore, Module numbers weight ``i`` on device ``k`` as ``i * devices + k``.
    """
    by_device = {i * devices + k: name for i, name in enumerate(names) for k in range(devices)}
    if optimizer.idx2name == by_device:
        optimizer.idx2name = dict(enumerate(names))


def group(module: mx.mod.Module) -> Any:
    """Return what holds a module's executors and their arrays."""
    return module._exec_group


def mark_dirty(module: mx.mod.BaseModule) -> None:
    """Note that the parameters that a module keeps are older than those of its executors."""
    module._params_dirty = True


def current(module: mx.mod.BucketingModule) -> Any:
    """Return the module of the current bucket."""
    return module._curr_module


def monitor_of(module: mx.mod.BucketingModule) -> Any:
    """Return the Monitor that was installed, None without one."""
    return module._monitor


def symbol_of(executor: mx.executor.Executor) -> mx.sym.Symbol:
    """Return the Symbol that it runs."""
    return executor._symbol


class Monitored:
    """A view of an executor for ``mx.mon.Monitor``: without the casts, of the FP32 network ``symbol``."""

    def __init__(self, executor: mx.executor.Executor, symbol: mx.sym.Symbol, plan: Plan) -> None:
        self._executor = executor
        self._symbol = symbol
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Set a callback that is called with the network's own operators only."""
        view = NetworkView(symbol_of(self._executor), self._plan)
        self._executor.set_monitor_callback(view.translated(callback), monitor_all)

    @property
    def arg_arrays(self) -> list[mx.nd.NDArray]:
        """Return FP32 arrays in the order of the network's arguments."""
        return [in_full(self._executor.arg_dict[name]) for name in self._symbol.list_arguments()]

    @property
    def aux_arrays(self) -> list[mx.nd.NDArray]:
        """Return FP32 arrays in the order of the network's auxiliary states."""
        return [in_full(self._executor.aux_dict[name]) for name in self._symbol.list_auxiliary_states()]


class _MonitoredExecutor(mx.executor.Executor):
    """An executor that delays Ctrl-C until it has run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with hold_interrupts():
            return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with hold_interrupts():
            super().backward(*args, **kwargs)


def twin(executor: mx.executor.Executor, callback: Callable) -> mx.executor.Executor:
    """Return another executor of the same graph on the same arrays, including intermediate ones, for a monitor."""
    made = executor.reshape(**{name: array.shape for name, array in executor.arg_dict.items()})
    made.__class__ = _MonitoredExecutor
    made.set_monitor_callback(callback)
    return made
