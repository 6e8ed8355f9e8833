"""One backward of two losses for two trainers with one scaler."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

body = nn.HybridSequential()
body.add(nn.Dense(32, activation="relu"))
head = nn.HybridSequential()
head.add(nn.Dense(4))
for net in (body, head):
    net.initialize()
    mxmp.convert(net, policy)
scaler = mxmp.DynamicLossScaler(init_scale=1024)
of_body = mxmp.Trainer(body.collect_params(), "sgd", {"learning_rate": 0.01}, loss_scale=scaler)
of_head = mxmp.Trainer(head.collect_params(), "adam", {"learning_rate": 0.01}, loss_scale=scaler)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(20):
    x, y = mx.nd.array(np.random.randn(16, 10)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        hidden = body(x)
        loss = loss_fn(head(hidden), y) + 0.01 * (hidden**2).sum(axis=1)
    of_body.backward(loss)
    of_body.step(16)
    of_head.step(16)
