"""Frozen layers, lr_mult, wd_mult and an optimizer object."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(32, activation="relu"), nn.Dense(4))
net.initialize()
net(mx.nd.ones((1, 10)))
mxmp.convert(net, policy)
net[0].collect_params().setattr("grad_req", "null")
net[1].collect_params().setattr("lr_mult", 0.1)
net.collect_params(".*bias").setattr("wd_mult", 0.0)
trainer = mxmp.Trainer(net.collect_params(), mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=1e-3))
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 10)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
    if step == 10:
        net[0].collect_params().setattr("grad_req", "write")
