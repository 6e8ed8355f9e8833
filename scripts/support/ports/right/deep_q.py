"""Q-learning with a target net that is copied every five steps."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def q_net():
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu", in_units=6), nn.Dense(4, in_units=32))
    net.initialize(mx.init.Xavier())
    return mxmp.convert(net, policy)


online, target = q_net(), q_net()


def copy():
    mxmp.set_master_weights(target, mxmp.master_weights(online))


copy()
trainer = mxmp.Trainer(online.collect_params(), "rmsprop", {"learning_rate": 0.001})
loss_fn = gluon.loss.HuberLoss()
for step in range(25):
    state, after = (mx.nd.array(np.random.randn(32, 6)) for _ in range(2))
    action, reward = mx.nd.array(np.random.randint(0, 4, 32)), mx.nd.array(np.random.randn(32))
    wanted = reward + 0.9 * target(after).max(axis=1)
    with autograd.record():
        loss = loss_fn(online(state).pick(action), wanted)
    trainer.backward(loss)
    trainer.step(32)
    if step % 5 == 4:
        copy()
