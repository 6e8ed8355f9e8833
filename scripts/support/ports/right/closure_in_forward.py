"""A schedule in a closure that hybrid_forward calls."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def schedule():
    count = 0

    def drop():
        nonlocal count
        count += 1
        return max(0.1, 1 - 0.1 * count)

    return drop


class Net(gluon.HybridBlock):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        with self.name_scope():
            self.body, self.head = nn.Dense(16, activation="relu"), nn.Dense(4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.head(self.body(x) * self.keep())


net = Net(schedule())
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
