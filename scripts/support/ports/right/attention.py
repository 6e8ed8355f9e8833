"""Self-attention with LayerNorm and a mask."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Attention(gluon.HybridBlock):
    def __init__(self, size):
        super().__init__()
        self.size = size
        with self.name_scope():
            self.query, self.key, self.value = (nn.Dense(size, flatten=False) for _ in range(3))
            self.norm = nn.LayerNorm()
            self.out = nn.Dense(5)

    def hybrid_forward(self, F, x, mask):  # noqa: N803
        scores = F.batch_dot(self.query(x), self.key(x), transpose_b=True) / self.size**0.5
        weights = F.softmax(F.broadcast_add(scores, -1e4 * (1 - F.expand_dims(mask, 1))))
        return self.out(self.norm(x + F.batch_dot(weights, self.value(x))))


net = Attention(16)
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "lamb", {"learning_rate": 0.01})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(20):
    x, y = mx.nd.array(np.random.randn(8, 6, 16)), mx.nd.array(np.random.randint(0, 5, 8))
    mask = mx.nd.array(np.arange(6) < np.random.randint(2, 7, (8, 1)))
    with autograd.record():
        loss = loss_fn(net(x, mask), y)
    trainer.backward(loss)
    trainer.step(8)
