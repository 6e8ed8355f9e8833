"""An MLP with a DataLoader that shuffles, and Adam."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

x = mx.nd.array(np.random.rand(256, 20))
y = mx.nd.array(np.random.randint(0, 10, 256))
data = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 32, shuffle=True)
net = nn.HybridSequential()
net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
for epoch in range(5):
    for a, b in data:
        with autograd.record():
            loss = loss_fn(net(a), b)
        trainer.backward(loss)
        trainer.step(a.shape[0])
    print(epoch, loss.mean().asscalar())
