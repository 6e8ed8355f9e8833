"""The context manager, within record and behind it by turns, and a backward of the script's own."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(4))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam")
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(20):
    x, y = mx.nd.array(np.random.randn(16, 10)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
        if step % 2:
            with trainer.scale_loss(loss) as scaled:
                autograd.backward(scaled)
    if not step % 2:
        with trainer.scale_loss(loss) as scaled:
            scaled.backward()
    trainer.step(16)
