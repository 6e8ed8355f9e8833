"""Random numbers stand still while a batch is replayed."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.saturating import BCE, binary, saturating
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import audit


def test_two_audits_of_a_net_with_dropout_agree():
    net, batch = saturating(dropout=0.5), binary()
    assert str(audit(net, BCE, batch)) == str(audit(net, BCE, batch))


class Noisy(gluon.HybridBlock):
    def __init__(self, draw):
        super().__init__(prefix="")
        self.draw = draw
        self.out = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.out(self.draw(F, x))


def of_numpy(draw):
    return lambda F, x: (x.as_np_ndarray() + draw(F.np.random)).as_nd_ndarray()  # noqa: N803


STAND_STILL = {
    "normal": lambda F, x: x + F.random.normal(shape=(8, 4)),  # noqa: N803
    "numpy's normal": of_numpy(lambda random: random.normal(size=(8, 4))),
    "numpy's uniform": of_numpy(lambda random: random.uniform(1, 2, size=(8, 4))),
    "a random slope": lambda F, x: F.LeakyReLU(-x, act_type="rrelu")[0],  # noqa: N803
}
REFUSED = {
    "gamma": lambda F, x: x + F.random.gamma(shape=(8, 4)),  # noqa: N803
    "a shuffle": lambda F, x: x * F.random.shuffle(x),  # noqa: N803
    "numpy's exponential": of_numpy(lambda random: random.exponential(size=(8, 4))),
    "numpy's normal around values": lambda F, x: F.np.random.normal(x.as_np_ndarray(), 1.0).as_nd_ndarray(),  # noqa: N803
}


@pytest.mark.parametrize("draw", [*STAND_STILL, *REFUSED])
def test_a_random_operator_stands_still_or_is_refused(draw):
    x, y = mx.nd.array(np.random.RandomState(0).randn(8, 4)), mx.nd.ones((8, 4))
    net = Noisy({**STAND_STILL, **REFUSED}[draw])
    net.initialize()
    mxmp.convert(net, "bfloat16")
    if draw in STAND_STILL:
        assert audit(net, gluon.loss.L2Loss(), (x, y)).is_healthy
    else:
        with pytest.raises(ValueError, match="draws random numbers"):
            audit(net, gluon.loss.L2Loss(), (x, y))


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
