"""Two devices, a batch divided between them."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

devices = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(4))
net.initialize(ctx=devices)
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(20):
    x, y = np.random.randn(32, 10), np.random.randint(0, 4, 32)
    xs, ys = (gluon.utils.split_and_load(mx.nd.array(each), devices) for each in (x, y))
    with autograd.record():
        losses = [loss_fn(net(a), b) for a, b in zip(xs, ys)]
    trainer.backward(losses)
    trainer.step(32)
