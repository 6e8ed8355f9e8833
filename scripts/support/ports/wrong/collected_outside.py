"""hybrid_forward appends features to a list that is no attribute, and the loss reads it."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

FEATURES = []


class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.head = nn.Dense(16, activation="relu"), nn.Dense(4)

    def hybrid_forward(self, F, x):  # noqa: N803
        hidden = self.body(x)
        FEATURES.append(hidden)
        return self.head(hidden)


net = Net()
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=2.0**12)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        FEATURES.clear()
        loss = loss_fn(net(x), y) + sum((each**2).mean() for each in FEATURES)
    trainer.backward(loss)
    trainer.step(16)
