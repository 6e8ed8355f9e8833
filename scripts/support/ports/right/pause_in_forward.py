"""A net with its own target: what hybrid_forward computes in pause gets no gradient, and drops nothing."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Distilled(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.drop = nn.Dense(16, activation="relu"), nn.Dropout(0.3)
            self.student, self.teacher = nn.Dense(4), nn.Dense(4)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.body(x)
        with autograd.pause():
            target = F.softmax(self.teacher(self.drop(x)))
        return self.student(x), self.teacher(x), target


net = Distilled()
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
hard, soft = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        student, teacher, target = net(x)
        loss = hard(teacher, y) + soft(student, target)
    trainer.backward(loss)
    trainer.step(16)
