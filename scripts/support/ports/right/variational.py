"""A variational autoencoder that draws its code inside the net."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Variational(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.encoder = nn.Dense(8)
            self.decoder = nn.HybridSequential()
            self.decoder.add(nn.Dense(16, activation="relu"), nn.Dense(12))

    def hybrid_forward(self, F, x):  # noqa: N803
        mean, spread = F.split(self.encoder(x), 2, axis=1)
        code = mean + F.exp(0.5 * spread) * F.random.normal_like(mean)
        divergence = 0.5 * F.sum(F.exp(spread) + mean**2 - 1 - spread, axis=1)
        return F.sum((self.decoder(code) - x) ** 2, axis=1) + divergence


net = Variational()
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.005})
for _step in range(20):
    x = mx.nd.array(np.random.randn(32, 12))
    with autograd.record():
        loss = net(x)
    trainer.backward(loss)
    trainer.step(32)
