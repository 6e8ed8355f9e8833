"""A convolutional net with BatchNorm, evaluated between epochs."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

x = mx.nd.array(np.random.rand(48, 3, 12, 12))
y = mx.nd.array(np.random.randint(0, 5, 48))
net = nn.HybridSequential()
net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D())
net.add(nn.Conv2D(32, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(5))
net.initialize(mx.init.MSRAPrelu())
net.hybridize(static_alloc=True)
mxmp.convert(net, policy)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = mxmp.Trainer(net.collect_params(), "nag", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4})
metric = mx.metric.Accuracy()
for epoch in range(7):
    for i in range(0, 48, 16):
        with autograd.record():
            loss = loss_fn(net(x[i : i + 16]), y[i : i + 16])
        trainer.backward(loss)
        trainer.step(16)
    metric.reset()
    metric.update([y], [net(x)])
    print(epoch, metric.get())
