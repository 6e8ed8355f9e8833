"""A net that runs a function of the test's on Symbols and arrays, plain and converted."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

DTYPES = ["float16", "bfloat16"]
X = mx.nd.array(np.random.RandomState(0).uniform(0.5, 1, (4, 3)))


class Takes(nn.HybridBlock):
    """Calls ``compute(block, op, x, *args)`` behind a dense layer."""

    def __init__(self, compute, **attributes):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=3)
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def hybrid_forward(self, op, x, *args):
        return self.compute(self, op, self.dense(x), *args)


class Around(nn.HybridBlock):
    def __init__(self, inner):
        super().__init__()
        with self.name_scope():
            self.inner, self.last = inner, nn.Dense(2, in_units=3)

    def hybrid_forward(self, op, x):
        return self.last(self.inner(x))


def pair(make, dtype, nested=False):
    """The net of ``make``, plain and converted, with the same weights; and what is to be changed in each."""
    nets, inner = [], []
    for how in (None, dtype):
        inner.append(make())
        net = Around(inner[-1]) if nested else inner[-1]
        mx.random.seed(3)
        net.initialize(mx.init.Xavier())
        nets.append(mxmp.convert(net, how) if how else net)
    return nets, inner


def assert_alike(nets, training=False):
    outs = []
    for net in nets:
        with autograd.record(training):
            outs.append(net(X))
    one, other = (out if isinstance(out, list) else [out] for out in outs)
    for low, full in zip(other, one):
        np.testing.assert_allclose(low.asnumpy(), full.asnumpy(), rtol=0.03, atol=0.02)


def takes(compute, dtype=None):
    """A net of ``compute(op, x, *args)``, with weights of one, converted unless ``dtype`` is None."""
    net = Takes(lambda block, op, x, *args: compute(op, x, *args))
    net.initialize(mx.init.One())
    return mxmp.convert(net, dtype) if dtype else net
