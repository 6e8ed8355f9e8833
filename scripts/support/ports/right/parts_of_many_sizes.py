"""A step adds gradients of parts of any size, and clips their sum. One rounding flips a ReLU for good."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.LayerNorm(), nn.Dense(3))
net.initialize()
mxmp.convert(net, policy)
net.collect_params().setattr("grad_req", "add")
trainer = mxmp.Trainer(net.collect_params(), "adadelta", {"rho": 0.9, "wd": 1e-3})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(21):
    seen = 0
    for _part in range(1 + step % 4):
        size = np.random.randint(5, 12)
        x = mx.nd.random.uniform(-1, 1, shape=(size, 7))
        with autograd.record():
            loss = loss_fn(net(x), (x.sum(axis=1) > 0) + (x.max(axis=1) > 0.9))
        trainer.backward(loss)
        seen += size
    trainer.clip_global_norm(0.7 * seen)
    trainer.step(seen)
    net.collect_params().zero_grad()
