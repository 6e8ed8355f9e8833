"""A sequence labeller with CTC loss."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = nn.HybridSequential()
net.add(gluon.rnn.GRU(16, layout="NTC", bidirectional=True), nn.Dense(6, flatten=False))
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.CTCLoss(layout="NTC", label_layout="NT")
for _step in range(22):
    x = mx.nd.array(np.random.randn(8, 12, 5))
    label = mx.nd.array(np.random.randint(0, 5, (8, 4)))
    with autograd.record():
        loss = loss_fn(net(x), label)
    trainer.backward(loss)
    trainer.step(8)
