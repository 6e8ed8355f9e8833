"""Lookahead: its slow weights are read where float16 is stored, and stand still."""

import sys

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

low = "compute=float16,params=float16" if policy == "float16" else policy
net = nn.HybridSequential()
net.add(nn.Dense(32, activation="tanh", in_units=6), nn.Dense(1, in_units=32))
net.initialize(mx.init.Uniform(1))
mxmp.convert(net, low)
net(mx.nd.zeros((1, 6)))
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 2e-5}, loss_scale=64)
loss_fn = gluon.loss.L2Loss()
slow = {name: param.data().copy() for name, param in net.collect_params().items()}
for step in range(25):
    x = mx.nd.random.normal(shape=(32, 6))
    with autograd.record():
        loss = loss_fn(net(x), x.sum(axis=1))
    trainer.backward(loss)
    trainer.step(32)
    if step % 5 == 4:
        for name, param in net.collect_params().items():
            slow[name] += 0.5 * (param.data() - slow[name])
            param.set_data(slow[name])
