"""Dropout between dense layers, hybridized."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(64, activation="relu"), nn.Dropout(0.5), nn.Dense(64, activation="relu"), nn.Dropout(0.3), nn.Dense(4))
net.initialize()
net.hybridize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.005})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(20):
    x, y = mx.nd.array(np.random.randn(32, 10)), mx.nd.array(np.random.randint(0, 4, 32))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(32)
