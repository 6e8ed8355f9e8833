"""Residual blocks written as HybridBlocks, with a schedule and warm-up."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Residual(gluon.HybridBlock):
    def __init__(self, channels, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
            self.body.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm())

    def hybrid_forward(self, F, x):  # noqa: N803
        return F.relu(x + self.body(x))


x = mx.nd.array(np.random.rand(40, 8, 8, 8))
y = mx.nd.array(np.random.randint(0, 4, 40))
net = nn.HybridSequential()
net.add(Residual(8), Residual(8), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(4))
net.initialize()
net = mxmp.convert(net, policy)
schedule = mx.lr_scheduler.CosineScheduler(40, base_lr=0.1, warmup_steps=5)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, "lr_scheduler": schedule})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(25):
    rows = np.random.choice(40, 16)
    with autograd.record():
        loss = loss_fn(net(x[mx.nd.array(rows)]), y[mx.nd.array(rows)])
    trainer.backward(loss)
    trainer.step(16)
