"""unscale, then MXNet's own clipping and a look at the gradients' norms."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(8))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
loss_fn = gluon.loss.L2Loss()
for step in range(25):
    x = mx.nd.array(np.random.randn(16, 12))
    with autograd.record():
        loss = loss_fn(net(x), x[:, :8] * 3)
    trainer.backward(loss)
    trainer.unscale()
    gradients = [p.grad() for p in net.collect_params().values()]
    norm = gluon.utils.clip_global_norm(gradients, 2.0)
    print(step, norm)
    trainer.step(16)
