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
    """Yield what to pass as ``kvstore`` to ``mx.mod.Module.init_optimizer``, so that no kvstore updates the weights.

    The module then updates them in its own process. Otherwise the kvstore would update them before mxmp could check
    the gradients. A KVStore is yielded itself; within the ``with`` block its ``is_capable`` returns False. A name is
    replaced by a new KVStore, treated in the same way, if the module has several ``devices`` (their number) or the name
    contains "dist". Any other name is yielded unchanged, and so is None, since ``mx.mod.Module`` then uses no kvstore.
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
    """Let the dict ``optimizer.idx2name`` map the index ``i`` to ``names[i]``, one index for all devices.

    ``mx.mod.Module`` has filled it otherwise: with the index ``i * devices + k`` for weight ``i`` on device ``k``.
    ``devices`` is the number of devices. If it holds anything else, the user has filled it, and it stays as it is.
    """
    by_device = {i * devices + k: name for i, name in enumerate(names) for k in range(devices)}
    if optimizer.idx2name == by_device:
        optimizer.idx2name = dict(enumerate(names))


def group(module: mx.mod.Module) -> Any:
    """Return a module's ``DataParallelExecutorGroup``: MXNet's object with one executor per device and their arrays."""
    return module._exec_group


def mark_dirty(module: mx.mod.BaseModule) -> None:
    """Mark a module's CPU copies of its parameters as outdated: it takes new ones from its executors before a use."""
    module._params_dirty = True


def current(module: mx.mod.BucketingModule) -> Any:
    """Return the module of the current bucket: that of the last ``switch_bucket``; before it, the default bucket."""
    return module._curr_module


def monitor_of(module: mx.mod.BucketingModule) -> Any:
    """Return the ``mx.mon.Monitor`` that was installed in a BucketingModule, or None."""
    return module._monitor


def symbol_of(executor: mx.executor.Executor) -> mx.sym.Symbol:
    """Return the Symbol that ``executor`` was bound to."""
    return executor._symbol


class Monitored:
    """Wraps an executor so that a ``mx.mon.Monitor`` sees the user's FP32 network, without the casts that run in it.

    ``Module.install_monitor`` gives this object to the monitor. Attributes that are not defined here are those of
    ``executor``, which runs the Symbol with casts. ``symbol`` is the user's FP32 Symbol, and ``plan`` the plan by which
    it was converted.
    """

    def __init__(self, executor: mx.executor.Executor, symbol: mx.sym.Symbol, plan: Plan) -> None:
        self._executor = executor
        self._symbol = symbol
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Let the wrapped executor call ``callback`` with the outputs and gradients of the user's operators, in FP32.

        Tensors of operators that mxmp inserted are left out. ``callback(name, handle)`` gets the name that MXNet's
        monitor gives the tensor in the FP32 Symbol, as bytes, such as ``b"fc_output"`` or ``b"fc_backward_output0"``,
        and the handle of an FP32 array, which the callback must free, as with MXNet's executor. Gradients are
        multiplied by the loss scale. ``monitor_all=True`` adds the inputs of operators.
        """
        view = NetworkView(symbol_of(self._executor), self._plan)
        self._executor.set_monitor_callback(view.translated(callback), monitor_all)

    @property
    def arg_arrays(self) -> list[mx.nd.NDArray]:
        """Return the arguments in the order of the user's Symbol; for arrays in low precision, FP32 copies."""
        return [in_full(self._executor.arg_dict[name]) for name in self._symbol.list_arguments()]

    @property
    def aux_arrays(self) -> list[mx.nd.NDArray]:
        """Return the auxiliary states in the order of the user's Symbol; for arrays in low precision, FP32 copies."""
        return [in_full(self._executor.aux_dict[name]) for name in self._symbol.list_auxiliary_states()]


class _MonitoredExecutor(mx.executor.Executor):
    """An executor with a monitor callback, which delays Ctrl-C until the forward or backward that runs has returned.

    Otherwise Ctrl-C would raise ``KeyboardInterrupt`` within the callback, and ctypes, which calls the callback, drops
    exceptions. The attribute ``is_training`` is True if the last forward was called with ``is_train=True``.
    """

    is_training = False

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        self.is_training = bool(is_train)
        with hold_interrupts():
            return super().forward(is_train, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with hold_interrupts():
            super().backward(*args, **kwargs)


def is_training(executor: mx.executor.Executor) -> bool:
    """Return whether the last forward of an executor of ``copy_with_callback`` was called with ``is_train=True``."""
    return executor.is_training


def copy_with_callback(executor: mx.executor.Executor, callback: Callable) -> mx.executor.Executor:
    """Return a second executor of the same graph that calls ``callback`` with each operator's outputs and gradients.

    MXNet calls ``callback(name, handle)``. It cannot remove a callback from an executor, and an executor with one runs
    operator by operator, which is slow. So the second executor gets the callback, and the caller can use ``executor``
    again later. Both share all memory: a forward of one may overwrite the outputs of the other.
    """
    made = executor.reshape(**{name: array.shape for name, array in executor.arg_dict.items()})
    made.__class__ = _MonitoredExecutor
    made.set_monitor_callback(callback)
    return made
