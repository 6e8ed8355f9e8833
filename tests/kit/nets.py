"""Small nets with weights of their own, and how they train."""

from __future__ import annotations

import functools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .twins import LOSS

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
