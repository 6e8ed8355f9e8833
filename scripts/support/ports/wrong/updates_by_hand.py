"""A part of the weights is updated by hand, from scaled gradients."""

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
trainer = mxmp.Trainer(net[1].collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=2.0**12)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    for param in net[0].collect_params().values():
        param.set_data(param.data() - 0.01 * param.grad())
    trainer.step(16)
