"""A triplet loss: one net called three times in a step."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(8))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
loss_fn = gluon.loss.TripletLoss()
for _step in range(20):
    anchor = mx.nd.array(np.random.randn(16, 6))
    near, far = anchor + 0.1 * mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randn(16, 6))
    with autograd.record():
        loss = loss_fn(net(anchor), net(near), net(far))
    trainer.backward(loss)
    trainer.step(16)
