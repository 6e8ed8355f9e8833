"""A net that takes Python values."""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import nn

import mxmp


class Takes(nn.HybridBlock):
    """Calls ``compute(op, dense(x), *args)``."""

    def __init__(self, compute):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=3)
        self.compute = compute

    def hybrid_forward(self, op, x, *args):
        return self.compute(op, self.dense(x), *args)


def takes(compute, dtype=None):
    net = Takes(compute)
    net.initialize(mx.init.One())
    return mxmp.convert(net, dtype) if dtype else net
