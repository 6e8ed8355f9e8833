"""A recursive net over trees, whose shape differs from sample to sample."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Tree(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.leaf = nn.Dense(12, in_units=4)
            self.join = nn.Dense(12, activation="tanh", in_units=24)
            self.head = nn.Dense(2, in_units=12)

    def encode(self, tree):
        if isinstance(tree, tuple):
            return self.join(mx.nd.concat(self.encode(tree[0]), self.encode(tree[1]), dim=1))
        return self.leaf(tree)

    def forward(self, tree):
        return self.head(self.encode(tree))


def random_tree(depth):
    if depth == 0 or np.random.rand() < 0.3:
        return mx.nd.array(np.random.randn(1, 4))
    return random_tree(depth - 1), random_tree(depth - 1)


net = Tree()
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adagrad", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(20):
    tree, label = (random_tree(3), random_tree(3)), mx.nd.array([step % 2])
    with autograd.record():
        loss = loss_fn(net(tree), label)
    trainer.backward(loss)
    trainer.step(1)
