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
    "copy_with_callback",
    "is_training",
    "number_weights_plainly",
    "symbol_of",
    "without_optimizer",
]

INHERITED = {
    "Module": (
        "_arg_params _aux_params _compression_params _context _exec_group _grad_req _group2ctxs _kvstore _optimizer "
        "_param_names _params_dirty _preload_opt_states _state_names _symbol _sync_params_from_devices _updater"
    ),
    "BucketingModule": (
        "_buckets _call_sym_gen _compression_params _context _curr_module _default_bucket_key _fixed_param_names "
        "_group2ctxs _monitor _params_dirty _reset_bind _state_names _work_load_list"
    ),
}


@contextmanager
def without_optimizer(kvstore: Any, devices: int) -> Iterator[Any]:
    """Yield a kvstore that says, within the ``with`` block, that it cannot run an optimizer.

    ``mx.mod.Module.init_optimizer``, called in the block, then updates weights in the worker. Otherwise it would let
    the kvstore update them (with "dist_sync" on the servers), where gradients cannot be checked first.

    Parameters
    ----------
    kvstore : KVStore, str or None
        As ``init_optimizer`` takes it. From a name a kvstore is created where ``mx.mod.Module`` creates one: for
        several devices or a "dist" name. Any other name, and None, is yielded as it is.
    devices : int
        The number of devices of the module.
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
    """Change ``optimizer.idx2name`` so that it maps ``i`` to the name of weight ``i``, whatever the device.

    mxmp updates weight ``i`` under the index ``i`` on every device. ``mx.mod.Module`` has set up ``idx2name`` with the
    index ``i * devices + k`` for weight ``i`` on device ``k``; a mapping that the user gave instead is left alone.
    ``names`` are those of all weights, in order.
    """
    by_device = {i * devices + k: name for i, name in enumerate(names) for k in range(devices)}
    if optimizer.idx2name == by_device:
        optimizer.idx2name = dict(enumerate(names))


def group(module: mx.mod.Module) -> Any:
    """Return a module's ``DataParallelExecutorGroup``, which holds one executor per device, and their arrays."""
    return module._exec_group


def mark_dirty(module: mx.mod.BaseModule) -> None:
    """Tell a module that its executors have newer parameters than the CPU copies that it keeps.

    ``get_params`` and the like then copy the parameters from the devices first.
    """
    module._params_dirty = True


def current(module: mx.mod.BucketingModule) -> Any:
    """Return the module of the bucket that the last ``switch_bucket`` chose."""
    return module._curr_module


def monitor_of(module: mx.mod.BucketingModule) -> Any:
    """Return the ``mx.mon.Monitor`` that was installed in a BucketingModule, or None."""
    return module._monitor


def symbol_of(executor: mx.executor.Executor) -> mx.sym.Symbol:
    """Return the Symbol that ``executor`` was bound to."""
    return executor._symbol


class Monitored:
    """An executor as ``mx.mon.Monitor`` is to see it: it reports the user's FP32 network, without the casts.

    A monitor installs itself in this object instead of the executor. All that is not defined here is the executor's.

    Parameters
    ----------
    executor : mxnet.executor.Executor
        Runs the Symbol with casts.
    symbol : Symbol
        The user's FP32 Symbol.
    plan : Plan
        The plan that the executor's Symbol follows.
    """

    def __init__(self, executor: mx.executor.Executor, symbol: mx.sym.Symbol, plan: Plan) -> None:
        self._executor = executor
        self._symbol = symbol
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the executor."""
        return getattr(self._executor, name)

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Let the executor call ``callback`` with the tensors of the user's operators only, as FP32 arrays.

        ``callback(name, handle)`` is as MXNet's executor takes it, with names of the FP32 Symbol such as
        ``"fc_output"``. ``monitor_all`` reports the operators' inputs too.
        """
        view = NetworkView(symbol_of(self._executor), self._plan)
        self._executor.set_monitor_callback(view.translated(callback), monitor_all)

    @property
    def arg_arrays(self) -> list[mx.nd.NDArray]:
        """Return the values of all arguments as FP32 arrays, in the order of the user's ``symbol.list_arguments()``."""
        return [in_full(self._executor.arg_dict[name]) for name in self._symbol.list_arguments()]

    @property
    def aux_arrays(self) -> list[mx.nd.NDArray]:
        """Return the auxiliary states as FP32 arrays, in the order of ``symbol.list_auxiliary_states()``."""
        return [in_full(self._executor.aux_dict[name]) for name in self._symbol.list_auxiliary_states()]


class _MonitoredExecutor(mx.executor.Executor):
    """An executor with a callback, which delays Ctrl-C until a forward or backward has returned.

    Otherwise a ``KeyboardInterrupt`` would be raised within the callback, where ctypes drops it.

    Attributes
    ----------
    is_training : bool
        Whether the last forward was called with ``is_train=True``.
    """

    is_training = False

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        """Run forward as ``mx.executor.Executor.forward``; a Ctrl-C during it is raised when it has returned."""
        self.is_training = bool(is_train)
        with hold_interrupts():
            return super().forward(is_train, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward as ``mx.executor.Executor.backward``; a Ctrl-C during it is raised when it has returned."""
        with hold_interrupts():
            super().backward(*args, **kwargs)


def is_training(executor: mx.executor.Executor) -> bool:
    """Return whether the last forward of an executor from ``copy_with_callback`` was in training mode."""
    return executor.is_training


def copy_with_callback(executor: mx.executor.Executor, callback: Callable) -> mx.executor.Executor:
    """Return a second executor of the same graph that calls ``callback`` with each operator's output.

    It shares all arrays with ``executor``: arguments, gradients, auxiliary states and memory for intermediate tensors.
    MXNet cannot remove a callback from an executor, and with one the executor runs operator by operator. So the
    callback is set on this second executor, and ``executor`` stays fast.
    """
    made = executor.reshape(**{name: array.shape for name, array in executor.arg_dict.items()})
    made.__class__ = _MonitoredExecutor
    made.set_monitor_callback(callback)
    return made
