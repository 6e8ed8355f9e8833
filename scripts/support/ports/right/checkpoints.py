"""Saves and loads in the middle, in one run."""

import os
import sys
import tempfile

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
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.L2Loss()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "run")
    for step in range(24):
        x = mx.nd.array(np.random.randn(16, 5))
        with autograd.record():
            loss = loss_fn(net(x), x.sum(axis=1))
        trainer.backward(loss)
        trainer.step(16)
        if step == 6:
            mxmp.save_checkpoint(path, net, trainer, epoch=step)
        if step == 10:
            print(mxmp.load_checkpoint(path, net, trainer))
