"""The body is frozen for some updates, and then trained; oneDNN's convolution over one axis fails in plain MXNet."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

body, head = nn.HybridSequential(), nn.Dense(4)
body.add(nn.Conv1D(8, 3, in_channels=2, activation="relu"), nn.BatchNorm(in_channels=8))
body.add(nn.Conv1D(12, 3, in_channels=8, activation="relu"), nn.GlobalAvgPool1D(), nn.Flatten())
net = nn.HybridSequential()
net.add(body, head)
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(30):
    if step in (0, 8):
        body.collect_params(".*(weight|bias|gamma|beta)").setattr("grad_req", "write" if step else "null")
    y = np.random.randint(0, 4, 16)
    x = np.sin(np.arange(20) * (y[:, None, None] + 1) * 0.5 + np.array([0, 1])[:, None]) + 0.3 * np.random.randn(
        16, 2, 20
    )
    with autograd.record():
        loss = loss_fn(net(mx.nd.array(x)), mx.nd.array(y))
    trainer.backward(loss)
    trainer.step(16)
