"""Sharpness-aware minimization, whose climb is as high as the loss scale. MXNet draws the data."""

import sys

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(24, activation="relu", in_units=6), nn.Dense(3, in_units=24))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3}, loss_scale=2.0**10)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(24):
    x = mx.nd.random.normal(shape=(16, 6))
    y = x[:, :3].argmax(axis=1)
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    before = {name: param.data().copy() for name, param in net.collect_params().items()}
    for param in net.collect_params().values():
        param.set_data(param.data() + 0.01 * param.grad() / 16)
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    for name, param in net.collect_params().items():
        param.set_data(before[name])
    trainer.step(16)
