"""A temperature that the script lowers, and a layer that is added later."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.temperature = 4.0
        with self.name_scope():
            self.body, self.head = nn.HybridSequential(), nn.Dense(4)
            self.body.add(nn.Dense(16, activation="relu"))

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.head(self.body(x)) / self.temperature


net = Net()
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(20):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
    net.temperature = max(1.0, net.temperature * 0.8)
    if step == 9:
        net.body.add(nn.Activation("tanh"))
