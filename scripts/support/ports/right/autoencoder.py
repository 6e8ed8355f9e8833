"""A convolutional autoencoder with transposed convolutions."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Conv2D(16, 3, strides=2, padding=1, activation="relu"), nn.Conv2D(16, 3, padding=1, activation="relu"))
net.add(nn.Conv2DTranspose(16, 2, strides=2, activation="relu"), nn.Conv2D(3, 3, padding=1, activation="sigmoid"))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.L2Loss()
for _step in range(20):
    x = mx.nd.array(np.random.rand(8, 3, 12, 12))
    with autograd.record():
        loss = loss_fn(net(x), x)
    trainer.backward(loss)
    trainer.step(8)
