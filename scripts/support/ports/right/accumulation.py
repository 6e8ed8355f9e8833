"""Gradients of four parts of a batch are added before each step."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="tanh"), nn.Dense(1))
net.initialize()
mxmp.convert(net, policy)
params = net.collect_params()
params.setattr("grad_req", "add")
trainer = mxmp.Trainer(params, "sgd", {"learning_rate": 0.1})
x = mx.nd.array(np.random.randn(640, 10))
y = x.sum(axis=1, keepdims=True)
for i in range(0, 640, 32):
    for j in range(4):
        rows = slice(i + 8 * j, i + 8 * j + 8)
        with autograd.record():
            loss = ((net(x[rows]) - y[rows]) ** 2).mean()
        trainer.backward(loss)
    trainer.step(4)
    params.zero_grad()
