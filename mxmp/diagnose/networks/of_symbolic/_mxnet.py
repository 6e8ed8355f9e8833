"""The private attributes of MXNet's modules and executors that diagnostics alone use."""

from __future__ import annotations

from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Callable, Iterator

import mxnet as mx

from ....host.callbacks import hold_interrupts
from ....kernels.fusion import unfused
from ....step.gradients import listed


def mark_dirty(module: mx.mod.BaseModule) -> None:
    """Let a module take new CPU copies of its parameters from its executors before it uses them."""
    module._params_dirty = True


class _MonitoredExecutor(mx.executor.Executor):
    """An executor with a monitor callback, which delays Ctrl-C until the forward or backward that runs has returned."""

    # Otherwise Ctrl-C raises ``KeyboardInterrupt`` within the callback, and ctypes, which calls it, drops exceptions.
    is_training = False

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        self.is_training = bool(is_train)
        with hold_interrupts():
            return super().forward(is_train, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with hold_interrupts():
            super().backward(*args, **kwargs)


def is_training(executor: mx.executor.Executor) -> bool:
    return executor.is_training


def copy_with_callback(executor: mx.executor.Executor, callback: Callable) -> mx.executor.Executor:
    """Return a second executor of the same graph that calls ``callback(name, handle)``; both share all memory."""
    # MXNet cannot remove a callback from an executor, and one with a callback runs operator by operator, which is slow.
    made = executor.reshape(**{name: array.shape for name, array in executor.arg_dict.items()})
    made.__class__ = _MonitoredExecutor
    made.set_monitor_callback(callback)
    return made


# -- MXNet's own modules, in a process of ``verify`` ---------------------------------------------------

optimizer_of, store_of = attrgetter("_optimizer"), attrgetter("_kvstore")


def unfused_for(module: mx.mod.BaseModule, symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return ``symbol`` as ``module`` is to bind it: without MXNet's fusion, which is wrong, as mxmp's modules."""
    contexts = getattr(module, "_context", ())  # a BucketingModule has none while it is made
    return unfused(symbol, listed(contexts), getattr(module, "_group2ctxs", None))


@contextmanager
def bound_unfused(module: mx.mod.Module) -> Iterator[None]:
    symbol, module._symbol = module._symbol, unfused_for(module, module._symbol)
    try:
        yield
    finally:
        module._symbol = symbol


def executing(module: mx.mod.BaseModule) -> mx.mod.Module:
    """Return the module that has the executors: that of the current bucket, or the module itself."""
    return module._curr_module if isinstance(module, mx.mod.BucketingModule) else module


def default_bucket(module: mx.mod.BucketingModule) -> mx.mod.Module:
    """Make the module of the default bucket, as ``mx.mod.BucketingModule.load`` does, and return it."""
    symbol, data_names, label_names = module._call_sym_gen(module._default_bucket_key)
    default = mx.mod.Module(symbol, data_names, label_names, context=module._context)
    module._buckets[module._default_bucket_key] = module._curr_module = default
    module.params_initialized = True
    return default
