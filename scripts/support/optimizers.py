"""Every optimizer of MXNet, with arguments and a schedule."""

from __future__ import annotations

from typing import Any

import mxnet as mx

# DCASGD's momentum fails in plain FP32 MXNet too; GroupAdaGrad takes 2-D weights and no weight decay.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adadelta": {"wd": 1e-3},
    "adagrad": {"learning_rate": 0.05, "wd": 1e-3},
    "adam": {"learning_rate": 0.01, "wd": 1e-3},
    "adamax": {"learning_rate": 0.01, "wd": 1e-3},
    "ccsgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
    "dcasgd": {"learning_rate": 0.05, "wd": 1e-3},
    "ftml": {"learning_rate": 0.01, "wd": 1e-3},
    "ftrl": {"learning_rate": 0.05, "wd": 1e-3},
    "groupadagrad": {"learning_rate": 0.05},
    "lamb": {"learning_rate": 0.01, "wd": 1e-3},
    "lars": {"learning_rate": 0.5, "momentum": 0.9, "wd": 1e-3},
    "lbsgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
    "nadam": {"learning_rate": 0.01, "wd": 1e-3},
    "nag": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
    "rmsprop": {"learning_rate": 0.01, "wd": 1e-3, "centered": True},
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
    "sgld": {"learning_rate": 1e-4, "wd": 1e-3},
    "signum": {"learning_rate": 0.01, "wd": 1e-3},
    "test": {"rescale_grad": -0.05},
}


def schedule(name: str) -> mx.lr_scheduler.LRScheduler:
    """A schedule that remembers where it is."""
    rate = OPTIMIZERS[name].get("learning_rate", 0.01)
    return mx.lr_scheduler.FactorScheduler(step=2, factor=0.9, base_lr=rate)


def options(name: str, scheduled: bool = False) -> dict[str, Any]:
    found = dict(OPTIMIZERS[name])
    if scheduled and name != "ftrl":  # Ftrl overwrites lr and cannot be scheduled
        found["lr_scheduler"] = schedule(name)
    return found
