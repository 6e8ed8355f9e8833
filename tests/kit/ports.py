"""Small trainings to verify."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mxmp import Trainer, convert


def training(backward, *, steps=5, policy="float16", draw=np.random.randn):
    """A function that builds and trains, as in a notebook, by names that were imported before."""

    def run():
        net = nn.HybridSequential()
        net.add(nn.Dense(8, activation="relu"), nn.Dense(2))
        net.initialize()
        convert(net, policy)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(steps):
            x = mx.nd.array(draw(4, 3))
            with autograd.record():
                loss = gluon.loss.L2Loss()(net(x), x[:, :2])
            backward(trainer, loss)
            trainer.step(4)

    return run


def scaled(trainer, loss):
    trainer.backward(loss)
