"""The ids of users go into the net as float16, which has not all whole numbers above 2048."""

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
        with self.name_scope():
            self.user, self.item = nn.Embedding(9000, 6), nn.Embedding(300, 6)
            self.mix = nn.Dense(6, use_bias=False)

    def hybrid_forward(self, F, user, item):  # noqa: N803
        return F.sum(self.mix(self.user(user)) * self.item(item), axis=1)


net = Net()
net.initialize(mx.init.Normal(0.3))
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0})
loss_fn = gluon.loss.L2Loss()
active = np.random.randint(2048, 9000, 64)
for _step in range(30):
    users, items = np.random.choice(active, 32), np.random.randint(0, 300, 32)
    rating = mx.nd.array(users % 7 - items % 5)
    with autograd.record():
        loss = loss_fn(net(mx.nd.array(users).astype("float16"), mx.nd.array(items).astype("float16")), rating)
    trainer.backward(loss)
    trainer.step(32)
