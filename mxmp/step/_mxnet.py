"""The private attributes of MXNet's that this package uses. A test holds each against 1.9.1."""

from __future__ import annotations

import sys
from typing import Sequence

import mxnet as mx
from mxnet.ndarray import NDArray


def is_called_by_user() -> bool:
    """Return whether user code, a module outside mxnet and mxmp, directly called the function that calls this one.

    mxmp's ``Parameter.data()`` is such a function: a user who gets the float16 array may write into it, and mxmp must
    then compare the array with its FP32 master before each update.
    """
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("mxnet", "mxmp")


def replicate_update_counts(optimizer: mx.optimizer.Optimizer, contexts: Sequence[mx.Context]) -> None:
    """Copy the optimizer's update counts from the device with the most updates to every device in ``contexts``.

    An update count says how often the optimizer has updated a parameter. MXNet keeps the counts per device, and a
    states file has those of the saved run's devices only. On any other device Adam's bias correction would start again,
    and a weight would no longer be the same on all devices.
    """
    saved = optimizer._all_index_update_counts.values()
    counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
    devices = {context.device_id for context in contexts}
    optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]


def update_by_momentum(optimizer: mx.optimizer.SGD, index: int, weight: NDArray, grad: NDArray, state: NDArray) -> None:
    """Update one dense FP32 weight in place by MXNet's ``sgd_mom_update``, and raise its update count in the optimizer.

    ``index`` is the weight's number in the optimizer, and ``state`` its momentum, which is updated too. MXNet's Updater
    uses a kernel for many weights, which gives the same bits but is slower for large ones on a CPU.
    """
    optimizer._set_current_context(weight.ctx.device_id)
    optimizer._update_count(index)
    settings = {"rescale_grad": optimizer.rescale_grad, "momentum": optimizer.momentum}
    if optimizer.clip_gradient:
        settings["clip_gradient"] = optimizer.clip_gradient
    lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
    mx.nd.sgd_mom_update(weight, grad, state, out=weight, lazy_update=False, lr=lr, wd=wd, **settings)
