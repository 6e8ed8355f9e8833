"""A net that bfloat16 and float16 ruin, as a sigmoid saturates in front of its loss, and a batch for it."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

import mxmp

BCE = gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=True)


def saturating(compute="bfloat16", dropout=0.0, **policy):
    """A sigmoid in front of an FP32 loss that reads how far from 1 it is."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(32, activation="relu", in_units=8), nn.BatchNorm(in_channels=32), nn.Dropout(dropout))
        net.add(nn.Dense(1, in_units=32), nn.HybridLambda("sigmoid", prefix="gate_"))
    net.initialize(mx.init.Xavier(magnitude=60))
    return mxmp.convert(net, mxmp.Policy(compute, low_ops=["sigmoid"], **policy))


def binary(rows=64, seed=0):
    rng = np.random.RandomState(seed)
    return mx.nd.array(rng.normal(size=(rows, 8))), mx.nd.array(rng.uniform(size=rows) > 0.5)
