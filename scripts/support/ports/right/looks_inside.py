"""explain, watch and a histogram, in the script."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(nn.Dense(16, activation="relu"), nn.Dense(4))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
print(mxmp.explain(net, mx.nd.ones((1, 6))))
with mxmp.diagnose.watch(net, trainer, every=5) as watched:
    for step in range(20):
        x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
        with autograd.record():
            loss = loss_fn(net(x), y)
        trainer.backward(loss)
        trainer.step(16)
        print(step, trainer.loss_scale, trainer.last_step_skipped)
print(watched.latest)
