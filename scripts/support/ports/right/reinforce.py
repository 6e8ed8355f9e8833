"""REINFORCE: actions are drawn from the policy net's probabilities."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(16, activation="tanh"), nn.Dense(3))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
baseline = 0.0
for _episode in range(20):
    states, actions, rewards = [], [], []
    state = np.random.randn(4)
    for _t in range(10):
        p = mx.nd.softmax(net(mx.nd.array(state[None])))[0].asnumpy()
        action = int((p.cumsum() < np.random.rand() * p.sum()).sum())
        states.append(state)
        actions.append(action)
        rewards.append(float(state[action]))
        state = 0.9 * state + 0.3 * np.random.randn(4)
    total = sum(rewards)
    baseline = 0.9 * baseline + 0.1 * total
    with autograd.record():
        chosen = mx.nd.pick(mx.nd.log_softmax(net(mx.nd.array(states))), mx.nd.array(actions))
        loss = -(chosen * (total - baseline)).mean()
    trainer.backward(loss)
    trainer.step(1)
