"""Bit-exact pictures of a training run."""

from __future__ import annotations

import copy
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon


def tree(value: Any) -> Any:
    """Host copies of any nesting of arrays, comparable with ``==``: arrays become dtype, shape and bytes."""
    if isinstance(value, mx.nd.NDArray):
        value = value.asnumpy()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {k: tree(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(v) for v in value]
    return copy.copy(value)


def weights(trainer: gluon.Trainer) -> Any:
    return [tree(p.list_data()) for p in trainer._params]


def full_weights(trainer: gluon.Trainer) -> Any:
    """FP32 values: masters where there are some."""
    return [tree(p.masters() if hasattr(p, "masters") else p.list_data()) for p in trainer._params]


def picture(trainer: gluon.Trainer) -> dict[str, Any]:
    """All that a skipped step must not change: weights, masters, states, counts, schedule, progress."""
    progress = {
        k: v
        for k, v in vars(trainer._optimizer).items()
        if k not in ("param_dict", "lr_scheduler", "_index_update_count", "rescale_grad")
    }
    schedule = trainer._optimizer.lr_scheduler
    return {
        "weights": weights(trainer),
        "masters": [tree(getattr(p, "_masters", None)) for p in trainer._params],
        "states": [tree(u.states) for u in trainer._updaters],
        "optimizer": tree(progress),
        "schedule": tree(vars(schedule)) if schedule is not None else None,
    }
