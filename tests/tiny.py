"""Small nets, every optimizer of MXNet, and bit-exact pictures of a training run."""

from __future__ import annotations

import copy
import functools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

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
LOSS = gluon.loss.L2Loss()
MASTERS = mxmp.Policy("float16", params="float16")
CASTS = mxmp.Policy("float16", params="float32")


def contexts(count: int) -> list[mx.Context]:
    return [mx.cpu(i) for i in range(count)]


def two_layers(
    policy: Any = None, devices: int = 1, grad_req: str = "write", seed: int = 7, bias: bool = False
) -> nn.HybridSequential:
    """Dense(4) and Dense(2) on 3 inputs, built and ready to train; the same weights for the same seed."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3, use_bias=bias, activation="tanh"), nn.Dense(2, in_units=4, use_bias=bias))
    rng = np.random.RandomState(seed)
    net.initialize(ctx=contexts(devices))
    for param in net.collect_params().values():
        param.set_data(mx.nd.array(rng.uniform(-0.5, 0.5, param.shape)))
        param.grad_req = grad_req
    net.hybridize()
    if policy is not None:
        mxmp.convert(net, policy)
        for ctx in contexts(devices):
            net(mx.nd.zeros((1, 3), ctx=ctx))
    return net


def batch(step: int, ctx: mx.Context | None = None) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Fresh handles: MXNet's backward spoils an input that another recorded graph shares."""
    x, y = _arrays(step, ctx)
    return x.detach(), y.detach()


@functools.lru_cache(maxsize=None)
def _arrays(step: int, ctx: mx.Context | None) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    rng = np.random.RandomState(1000 + step)
    return mx.nd.array(rng.randn(4, 3), ctx=ctx), mx.nd.array(rng.randn(4, 2), ctx=ctx)


def forward(net: gluon.Block, step: int, devices: int = 1) -> list[mx.nd.NDArray]:
    """One recorded loss per device."""
    with autograd.record():
        return [LOSS(net(x), y) for x, y in (batch(step * 10 + i, ctx) for i, ctx in enumerate(contexts(devices)))]


def train(net: gluon.Block, trainer: gluon.Trainer, steps: Any, devices: int = 1, batch_size: int = 4) -> None:
    for step in steps:
        losses = forward(net, step, devices)
        if isinstance(trainer.optimizer, mx.optimizer.SGLD):
            mx.random.seed(step)
        if isinstance(trainer, mxmp.Trainer):
            trainer.backward(losses)
        else:
            autograd.backward(losses)
        trainer.step(batch_size)


def overflow(trainer: gluon.Trainer, param: int = 0, device: int = 0, value: float = np.inf) -> None:
    grad = trainer._params[param].list_grad()[device]
    grad[:] = value


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


def schedule(name: str) -> mx.lr_scheduler.LRScheduler:
    """A schedule that remembers where it is."""
    rate = OPTIMIZERS[name].get("learning_rate", 0.01)
    return mx.lr_scheduler.FactorScheduler(step=2, factor=0.9, base_lr=rate)


def options(name: str, scheduled: bool = False) -> dict[str, Any]:
    found = dict(OPTIMIZERS[name])
    if scheduled and name != "ftrl":  # Ftrl overwrites lr and cannot be scheduled
        found["lr_scheduler"] = schedule(name)
    return found
