"""Steps whose gradient is too large are left out by the script."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(16, activation="relu"), nn.Dense(1))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
loss_fn = gluon.loss.L2Loss()
left_out = 0
for step in range(40):
    x = mx.nd.array(np.random.randn(8, 5))
    y = x.sum(axis=1) * (20 if step % 7 == 3 else 1)
    with autograd.record():
        loss = loss_fn(net(x), y)
    trainer.backward(loss)
    if trainer.clip_global_norm(100.0) > 200:
        trainer.discard()
        left_out += 1
        continue
    trainer.step(8)
print(left_out, "left out")
