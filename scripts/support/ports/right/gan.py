"""A GAN with two trainers, and labels that are made once."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def mlp(*sizes):
    net = nn.HybridSequential()
    for size in sizes[:-1]:
        net.add(nn.Dense(size, activation="relu"))
    net.add(nn.Dense(sizes[-1]))
    net.initialize(mx.init.Normal(0.1))
    return mxmp.convert(net, policy)


generator, critic = mlp(32, 2), mlp(32, 1)
loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
of_generator = mxmp.Trainer(generator.collect_params(), "adam", {"learning_rate": 1e-3, "beta1": 0.5})
of_critic = mxmp.Trainer(critic.collect_params(), "adam", {"learning_rate": 1e-3, "beta1": 0.5})
ones, zeros = mx.nd.ones(32), mx.nd.zeros(32)
for _step in range(30):
    real = mx.nd.array(np.random.randn(32, 2) * 0.5 + 1)
    noise = mx.nd.random.normal(shape=(32, 8))
    with autograd.record():
        loss = loss_fn(critic(real), ones) + loss_fn(critic(generator(noise).detach()), zeros)
    of_critic.backward(loss)
    of_critic.step(32)
    with autograd.record():
        loss = loss_fn(critic(generator(noise)), ones)
    of_generator.backward(loss)
    of_generator.step(32)
