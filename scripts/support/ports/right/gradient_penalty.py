"""A critic whose loss has the gradient of its own output."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

critic = nn.HybridSequential()
critic.add(nn.Dense(24, activation="tanh"), nn.Dense(1))
critic.initialize(mx.init.Xavier())
mxmp.convert(critic, policy)
trainer = mxmp.Trainer(critic.collect_params(), "adam", {"learning_rate": 0.001, "beta1": 0.0})
for _step in range(20):
    x = mx.nd.array(np.random.randn(16, 3))
    other = mx.nd.array(np.random.randn(16, 3) + 1)
    between = 0.5 * (x + other)
    between.attach_grad()
    with autograd.record():
        slope = critic(between + 0.1) - critic(between - 0.1)
        penalty = ((slope / 0.2 - 1) ** 2).mean()
        loss = critic(x).mean() - critic(other).mean() + 10 * penalty
    trainer.backward(loss)
    trainer.step(1)
