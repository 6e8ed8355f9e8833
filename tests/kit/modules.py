"""A small Module, and how it trains."""

from __future__ import annotations

import random
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import mxmp

from .twins import array

SHAPES = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}


def mlp() -> mx.sym.Symbol:
    """Two layers on 6 inputs, of 5 units and 3 classes."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x, name="tanh"), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax")


def bucketing(**more: Any) -> mxmp.BucketingModule:
    return mxmp.BucketingModule(lambda key: (mlp(), ["data"], ["softmax_label"]), 0, **more)


WIDE = 300  # ``wide`` has some 360 kB of weights, adam's states three times as much


def wide() -> mx.sym.Symbol:
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=WIDE, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3, name="fc2"), name="softmax")


def wide_bucketing() -> mxmp.BucketingModule:
    """One that trains ``wide`` with adam, ready for its first batch."""
    made = mxmp.BucketingModule(lambda key: (wide(), ["data"], ["softmax_label"]), 0)
    made.bind([("data", (4, WIDE))], [("softmax_label", (4,))])
    made.init_params()
    made.init_optimizer(optimizer="adam")
    return made


def start() -> dict[str, mx.nd.NDArray]:
    """The same weights of ``mlp`` at every call."""
    rng = np.random.RandomState(0)
    return {name: mx.nd.array(rng.uniform(-0.5, 0.5, shape)) for name, shape in SHAPES.items()}


def bound(module: Any, **more: Any) -> Any:
    """``module``, bound to batches of 4, with the weights of ``start`` unless it has some."""
    module.bind([("data", (4, 6))], [("softmax_label", (4,))], **more)
    if not module.params_initialized:
        module.init_params(arg_params=start(), aux_params={})
    return module


def batch(i: int) -> mx.io.DataBatch:
    data, label = [("data", (4, 6))], [("softmax_label", (4,))]
    arrays = [array(i, 4, 6)], [mx.nd.array([0, 1, 2, i % 3])]
    return mx.io.DataBatch(*arrays, bucket_key=0, provide_data=data, provide_label=label)


def train(module: Any, program: Iterable[int | mx.io.DataBatch]) -> None:
    """A step for each batch, or for each number of one."""
    for each in program:
        module.forward_backward(batch(each) if isinstance(each, int) else each)
        module.update()


def weights(module: Any) -> list[np.ndarray]:
    return [module.get_params()[0][name].asnumpy() for name in SHAPES]


def run_of(policy, seed):
    mx.random.seed(seed)
    np.random.seed(seed)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(8, in_units=4), gluon.nn.BatchNorm(in_channels=8), gluon.nn.Dropout(0.5))
        net.add(gluon.nn.Dense(2, in_units=8))
    net.initialize(mx.init.Xavier())
    mxmp.convert(net, policy)
    scaler = mxmp.DynamicLossScaler(2.0**8, growth_interval=2)
    return net, mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, loss_scale=scaler)


def symbol_of():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="a")
    x = mx.sym.Dropout(mx.sym.relu(mx.sym.BatchNorm(x, fix_gamma=False, name="n")), p=0.5)
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=2, name="b"), name="softmax")


def module_of(policy, seed):
    mx.random.seed(seed)
    np.random.seed(seed)
    scaler = mxmp.DynamicLossScaler(2.0**8, growth_interval=2)
    module = mxmp.Module(symbol_of(), policy=policy, loss_scale=scaler)
    module.bind([("data", (6, 4))], [("softmax_label", (6,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01})
    return module


def train_module(module, steps):
    for _ in range(steps):
        x, y = mx.nd.array(np.random.normal(0, 1, (6, 4))), mx.nd.array(np.random.randint(0, 2, 6))
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()


def train_on_random_numbers(net, trainer, steps):
    """Inputs come from NumPy's and Python's random numbers, dropout from MXNet's."""
    for _ in range(steps):
        x = mx.nd.array(np.random.normal(0, random.uniform(1, 2), (6, 4)))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        trainer.backward(loss)
        trainer.step(6)


def warnings_of_another_step(caplog):
    """What was logged of states and parameters of different steps; the log is empty afterwards."""
    found = [record.getMessage() for record in caplog.records if "other values" in record.getMessage()]
    caplog.clear()
    return found
