"""Random numbers stand still while a batch is replayed."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import audit

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


def test_two_audits_of_a_net_with_dropout_agree():
    net, batch = saturating(dropout=0.5), binary()
    assert str(audit(net, BCE, batch)) == str(audit(net, BCE, batch))


def test_a_random_operator_stands_still_or_is_refused():
    class Noisy(gluon.HybridBlock):
        def __init__(self, draw):
            super().__init__(prefix="")
            self.draw = draw
            self.out = nn.Dense(4, in_units=4)

        def hybrid_forward(self, F, x):  # noqa: N803
            return self.out(x + self.draw(F))

    x, y = mx.nd.ones((8, 4)), mx.nd.ones((8, 4))
    net = Noisy(lambda ops: ops.random.normal(shape=(8, 4)))
    net.initialize()
    assert audit(mxmp.convert(net, "bfloat16"), gluon.loss.L2Loss(), (x, y)).is_healthy
    net = Noisy(lambda ops: ops.random.gamma(shape=(8, 4)))
    net.initialize()
    with pytest.raises(ValueError, match="draws random numbers"):
        audit(mxmp.convert(net, "bfloat16"), gluon.loss.L2Loss(), (x, y))


BOTH = ("float16", "bfloat16")


class Branch(gluon.HybridBlock):
    """Control flow of each kind, with dropout inside."""

    def __init__(self, kind):
        super().__init__(prefix="branch_")
        self.kind = kind
        with self.name_scope():
            self.dense, self.drop, self.out = nn.Dense(8, in_units=8), nn.Dropout(0.5), nn.Dense(2, in_units=8)

    def hybrid_forward(self, F, x):  # noqa: N803
        def step(value):
            return self.drop(F.tanh(self.dense(value)))

        if self.kind == "cond":
            return self.out(F.contrib.cond(F.sum(x) > 0, lambda: step(x), lambda: step(x * 2)))
        start = F.zeros((1,))
        _, (found, _) = F.contrib.while_loop(
            lambda value, i: i < 3, lambda value, i: (value, (step(value), i + 1)), (x, start), max_iterations=4
        )
        return self.out(found)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("kind", ["cond", "while_loop"])
def test_control_flow_with_dropout_inside_is_audited(kind, dtype):
    net = Branch(kind)
    net.initialize(mx.init.Xavier())
    x, y = mx.nd.random.normal(shape=(16, 8)), mx.nd.random.normal(shape=(16, 2))
    mxmp.convert(net, dtype)
    assert audit(net, None, x).is_healthy
    if kind == "cond":  # MXNet's gradients through while_loop are what was in memory
        assert audit(net, gluon.loss.L2Loss(), (x, y)).is_healthy
