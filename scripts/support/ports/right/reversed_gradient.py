"""Domain adaptation: features that a classifier of domains cannot tell apart, by a reversed gradient."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Adapted(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.strength = 0.0
        with self.name_scope():
            self.body = nn.Dense(16, activation="relu")
            self.classes, self.domains = nn.Dense(4), nn.Dense(2)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.body(x)
        turned = F.BlockGrad((1 + self.strength) * x) - self.strength * x
        return self.classes(x), self.domains(turned)


net = Adapted()
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(30):
    net.strength = round(2 / (1 + np.exp(-step / 5)) - 1, 1)
    y, domain = np.random.randint(0, 4, 16), np.random.randint(0, 2, 16)
    x = np.random.randn(16, 6) + domain[:, None] + 0.5 * y[:, None]
    with autograd.record():
        classes, domains = net(mx.nd.array(x))
        loss = loss_fn(classes, mx.nd.array(y)) + loss_fn(domains, mx.nd.array(domain))
    trainer.backward(loss)
    trainer.step(16)
