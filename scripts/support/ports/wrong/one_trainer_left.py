"""Two nets, and only one of their trainers is mxmp's: the small gradients of the other underflow in float16."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def mapping():
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="tanh"), nn.Dense(32))
    net.initialize(mx.init.Xavier())
    return mxmp.convert(net, policy)


there, back = mapping(), mapping()
trainer = mxmp.Trainer(there.collect_params(), "adam", {"learning_rate": 0.002})
other = gluon.Trainer(back.collect_params(), "adam", {"learning_rate": 0.002, "epsilon": 1e-12})
for _step in range(30):
    a = mx.nd.array(np.random.randn(64, 32) * 0.1)
    b = mx.nd.tanh(a * 2)
    with autograd.record():
        loss = ((there(a) - b) ** 2).mean()
    trainer.backward(loss)
    trainer.step(1)
    with autograd.record():
        cycle = 0.0002 * ((back(b) - a) ** 2).mean()
    cycle.backward()
    other.step(1)
