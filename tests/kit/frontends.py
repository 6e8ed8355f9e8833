"""Networks built to go wrong in one named layer, and how they train through either frontend."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .twins import LOSS, value


class Chain(gluon.HybridBlock):
    """Layers by name, each an operator of ``mx.sym`` or ``mx.nd`` or a block."""

    def __init__(self, *layers, **kwargs):
        super().__init__(prefix="", **kwargs)
        self._layers = []
        with self.name_scope():
            for name, layer in layers:
                self._layers.append(name)
                setattr(self, name, layer)

    def hybrid_forward(self, F, x):  # noqa: N803
        for name in self._layers:
            layer = getattr(self, name)
            x = layer(x) if isinstance(layer, gluon.Block) else layer(F, x)
        return x


def dense(name, units, inputs, **kwargs):
    return name, nn.Dense(units, in_units=inputs, use_bias=False, prefix=f"{name}_", **kwargs)


def values(net, seed=3, **scales):
    """Weights of size 0.5, those of the named layers times a factor."""
    net.initialize()
    rng = np.random.RandomState(seed)
    for name, param in net.collect_params().items():
        if name.endswith("weight"):
            factor = next((v for k, v in scales.items() if name.startswith(k)), 1.0)
            param.set_data(mx.nd.array(rng.uniform(-0.5, 0.5, param.shape) * factor))
    return net


def three(first=1.0, middle=1.0, last=1.0):
    """first, middle and last, dense layers with weights of these sizes."""
    net = Chain(dense("first", 8, 6), dense("middle", 8, 8), dense("last", 4, 8))
    return values(net, first=first, middle=middle, last=last)


def convolutional(dropout=True):
    """What keeps state: BatchNorm's running statistics and Dropout's random numbers."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Activation("relu"))
        net.add(*([nn.Dropout(0.5)] if dropout else []), nn.Conv2D(6, 1, in_channels=4), nn.GlobalAvgPool2D())
        net.add(nn.Dense(4, in_units=6))
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    return net


def symbol(net, inputs="data"):
    return net(mx.sym.var(inputs))


def batch(step=0, shape=(4, 6), classes=4, ctx=None):
    rng = np.random.RandomState(100 + step)
    x = mx.nd.array(rng.uniform(-1, 1, shape), ctx=ctx)
    y = mx.nd.array(rng.uniform(-1, 1, (shape[0], classes)), ctx=ctx)
    return x, y


def gluon_run(net, loss_scale=8.0, policy="float16", **options):
    mxmp.convert(net, policy)
    options = {"learning_rate": 0.01, "momentum": 0.9, **options}
    return mxmp.Trainer(net.collect_params(), "sgd", options, loss_scale=loss_scale)


def gluon_step(net, trainer, x, y, factor=1.0):
    with autograd.record():
        loss = LOSS(net(x), y) * factor
    trainer.backward(loss)
    trainer.step(x.shape[0])
    return loss


def module_of(net, x, y, loss_scale=8.0, policy="float16", factor=1.0, **options):
    """An mxmp.Module with the net's weights and the loss of ``gluon_step``."""
    label = mx.sym.var("label")
    error = mx.sym.square(symbol(net) - label, name="error") * (0.5 * factor)
    loss = mx.sym.MakeLoss(mx.sym.mean(error, axis=0, exclude=True), name="loss")
    module = mxmp.Module(loss, ["data"], ["label"], policy=policy, loss_scale=loss_scale)
    module.bind([("data", x.shape)], [("label", y.shape)])
    params = {name: param.data() for name, param in net.collect_params().items() if param.grad_req != "null"}
    running = {name: param.data() for name, param in net.collect_params().items() if param.grad_req == "null"}
    module.init_params(arg_params=params, aux_params=running)
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.01, "momentum": 0.9, **options})
    return module


def module_step(module, x, y):
    module.forward_backward(mx.io.DataBatch([x], [y]))
    module.update()


class Run:
    """A net that trains through either door: ``target`` is what ``watch``, ``guard`` and ``blame`` take."""

    def __init__(self, door, net, policy="float16", loss_scale=8.0, factor=1.0, on=None, **options):
        self.net, self.factor, self.batch = net, factor, on or batch()
        self.is_gluon = door == "gluon"
        with mx.name.NameManager():
            if self.is_gluon:
                self.steps = gluon_run(net, loss_scale, policy, **options)
            else:
                self.steps = module_of(net, *self.batch, loss_scale, policy, factor, **options)
        self.target = (net, self.steps) if self.is_gluon else (self.steps,)

    def step(self, i=None):
        """A step, with the first batch or number ``i``; returns whether it was skipped."""
        pair = self.batch if i is None else batch(i)
        if self.is_gluon:
            gluon_step(*self.target, *pair, self.factor)
        else:
            module_step(self.steps, *pair)
        return self.steps.last_step_skipped

    def weights(self):
        """FP32 values by name, from the masters where there are some."""
        if self.is_gluon:
            return {name: value(param) for name, param in sorted(self.net.collect_params().items())}
        return {name: array.asnumpy() for name, array in sorted(self.steps.get_params()[0].items())}

    def gradients(self):
        if self.is_gluon:
            return {name: param.grad().asnumpy() for name, param in self.net.collect_params().items()}
        group = self.steps._exec_group
        return {n: grads[0].asnumpy() for n, grads in zip(group.param_names, group.grad_arrays) if grads[0] is not None}

    def plan(self):
        return mxmp.explain(self.target[0]).graphs[-1].plan

    def blame(self, **options):
        x, y = self.batch
        if self.is_gluon:
            return mxmp.diagnose.blame(*self.target, x, loss=lambda out: LOSS(out, y) * self.factor, **options)
        return mxmp.diagnose.blame(*self.target, mx.io.DataBatch([x], [y]), **options)


def tensors(snapshot, kind):
    """What ``watch`` has seen of this kind, by name."""
    return {t.name: t for t in snapshot.tensors if t.kind == kind}
