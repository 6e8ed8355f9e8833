"""The private attributes of MXNet's that this package uses. A test holds each against 1.9.1."""

from __future__ import annotations

import gc
import sys
from types import FunctionType
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB
from mxnet.ndarray import NDArray


def is_called_by_user() -> bool:
    """Return whether code outside mxnet and mxmp directly called the function that calls this one."""
    # For ``Parameter.data()``: a user who gets the float16 array may write into it, so that mxmp must compare the array
    # with its FP32 master before each update.
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("mxnet", "mxmp")


def replicate_update_counts(optimizer: mx.optimizer.Optimizer, contexts: Sequence[mx.Context]) -> None:
    """Give every device in ``contexts`` the update counts of the device with the most updates."""
    # MXNet keeps the counts per device, and a file has those of the saved run's devices only. On any other device
    # Adam's bias correction would start again, and a weight would no longer be the same on all devices.
    saved = optimizer._all_index_update_counts.values()
    counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
    devices = {context.device_id for context in contexts}
    optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]


def update_by_momentum(optimizer: mx.optimizer.SGD, index: int, weight: NDArray, grad: NDArray, state: NDArray) -> None:
    """Update a dense FP32 weight and its momentum ``state`` in place by MXNet's ``sgd_mom_update``."""
    optimizer._set_current_context(weight.ctx.device_id)
    optimizer._update_count(index)
    settings = {"rescale_grad": optimizer.rescale_grad, "momentum": optimizer.momentum}
    if optimizer.clip_gradient:
        settings["clip_gradient"] = optimizer.clip_gradient
    lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
    # MXNet's Updater uses a kernel for many weights: the same bits, but slower for large weights on a CPU.
    mx.nd.sgd_mom_update(weight, grad, state, out=weight, lazy_update=False, lr=lr, wd=wd, **settings)


def python_operators() -> list[Any]:
    """Return the living objects whose method ``backward`` MXNet may call: custom operators, ``autograd.Function``s."""
    made = list(mx.operator._registry.ref_holder.values())
    customs = [each for each in made if isinstance(each, mx.operator.CustomOp)]
    return [*customs, *mx.operator.PythonOp._ref_holder, *_recorded_functions()]


def _recorded_functions() -> list[autograd.Function]:
    # MXNet keeps the callbacks of a recorded Function, closures over it, in C structures.
    found: list[autograd.Function] = []
    seen: set[int] = set()
    todo: list[Any] = list(autograd.Function._registry.ref_holder.values())
    while todo:
        inner = [each for each in gc.get_referents(*todo) if not isinstance(each, type) and id(each) not in seen]
        seen.update(map(id, inner))
        held = [cell.cell_contents for each in inner for cell in getattr(each, "__closure__", None) or ()]
        found += [each for each in held if isinstance(each, autograd.Function)]
        todo = [each for each in inner if not isinstance(each, FunctionType)]
    return list({id(each): each for each in found}.values())


def before_files_are_written(call: Callable[[bytes], None]) -> None:
    """Let ``call(path)`` precede each file that MXNet's library writes by itself; for a process of ``verify``."""

    def after(function: Any) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            for arg in args:
                path = getattr(arg, "value", arg)
                if isinstance(path, bytes):
                    call(path)
                    break
            return function(*args)

        return write

    for name in ("MXNDArraySave", "MXSymbolSaveToFile", "MXRecordIOWriterCreate"):
        setattr(_LIB, name, after(getattr(_LIB, name)))
