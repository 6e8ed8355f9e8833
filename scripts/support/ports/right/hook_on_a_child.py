"""A forward hook of a child collects values."""

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
norms = []
net[0].register_forward_hook(lambda block, inputs, output: norms.append(float(output.norm().asscalar())))
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    trainer.step(16)
