"""An exponential moving average of the weights, evaluated as a second net."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def build():
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu", in_units=5), nn.BatchNorm(in_channels=16), nn.Dense(1, in_units=16))
    net.initialize()
    return mxmp.convert(net, policy)


net, average = build(), build()
mean = mxmp.master_weights(net)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.L2Loss()
for step in range(20):
    x = mx.nd.array(np.random.randn(16, 5))
    with autograd.record():
        loss = loss_fn(net(x), x.sum(axis=1))
    trainer.backward(loss)
    trainer.step(16)
    now = mxmp.master_weights(net)
    mean = {name: 0.9 * mean[name] + 0.1 * now[name] for name in mean}
    mxmp.set_master_weights(average, mean)
    print(step, loss_fn(average(x), x.sum(axis=1)).mean().asscalar())
