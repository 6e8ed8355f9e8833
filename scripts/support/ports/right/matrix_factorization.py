"""Embeddings of users and items, and a dense layer."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Factors(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.users, self.items = nn.Embedding(40, 8), nn.Embedding(60, 8)
            self.mix = nn.Dense(8)

    def hybrid_forward(self, F, user, item):  # noqa: N803
        return F.sum(self.mix(self.users(user)) * self.items(item), axis=1)


net = Factors()
net.initialize(mx.init.Normal(0.1))
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.02})
loss_fn = gluon.loss.L2Loss()
for _step in range(20):
    user, item = mx.nd.array(np.random.randint(0, 40, 64)), mx.nd.array(np.random.randint(0, 60, 64))
    with autograd.record():
        loss = loss_fn(net(user, item), (user + item) % 5)
    trainer.backward(loss)
    trainer.step(64)
