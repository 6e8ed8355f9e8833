"""A year as a raw column, which low precision rounds; the first layer has whole numbers, and keeps them."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(4))
net.initialize()
mxmp.convert(net, policy)
net(mx.nd.ones((1, 6)))
net[0].weight.data()[:, 0] = mx.nd.array(np.random.choice([-1.0, 1.0], 32))
net[0].bias.data()[:] = -2010 * net[0].weight.data()[:, 0]
net[0].collect_params().setattr("lr_mult", 0.0)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    year = np.random.randint(1995, 2025, (16, 1))
    x, y = mx.nd.array(np.concatenate([year, np.random.randn(16, 5)], 1)), mx.nd.array((year[:, 0] - 1995) // 8)
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
