"""MXNet's NumPy interface."""

import sys

import numpy as np
from mxnet import autograd, gluon, npx
from mxnet import np as mnp
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


npx.set_np()
net = nn.HybridSequential()
net.add(nn.Dense(16, activation="relu"), nn.Dense(4))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(20):
    x, y = mnp.array(np.random.randn(16, 6), dtype="float32"), mnp.array(np.random.randint(0, 4, 16), dtype="float32")
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
