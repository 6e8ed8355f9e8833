"""The script averages gradients by hand, while their scale changes."""

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
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=2.0**12)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
mean = {}
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    for name, param in net.collect_params().items():
        mean[name] = 0.9 * mean.get(name, 0) + 0.1 * param.grad() / trainer.loss_scale
        param.grad()[:] = mean[name]
    trainer.step(16)
