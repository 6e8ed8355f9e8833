"""A first-order meta-learner: an inner step on a copy, and its gradient for the outer one."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def model():
    net = nn.HybridSequential()
    net.add(nn.Dense(20, activation="tanh", in_units=1), nn.Dense(1, in_units=20))
    net.initialize(mx.init.Xavier())
    return mxmp.convert(net, policy)


outer, inner = model(), model()
of_outer = mxmp.Trainer(outer.collect_params(), "adam", {"learning_rate": 0.01})
of_inner = mxmp.Trainer(inner.collect_params(), "sgd", {"learning_rate": 0.05})
loss_fn = gluon.loss.L2Loss()
for _task in range(20):
    shift = np.random.rand() * 3
    x = mx.nd.array(np.random.rand(16, 1) * 4)
    y = mx.nd.sin(x + shift)
    mxmp.set_master_weights(inner, mxmp.master_weights(outer))
    with autograd.record():
        loss = loss_fn(inner(x), y)
    of_inner.backward(loss)
    of_inner.step(16)
    with autograd.record():
        loss = loss_fn(outer(x), y) + 0.1 * loss_fn(outer(x), inner(x).detach())
    of_outer.backward(loss)
    of_outer.step(16)
