"""Gradients through graphs and the Python code between them, one segment after the other."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import audit

BOTH = ("float16", "bfloat16")


BCE = gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=True)


def judged(dtype):
    """A generator, and a judge whose sigmoid in low precision saturates, which the loss of the generator calls."""
    mx.random.seed(1)
    net, judge = nn.HybridSequential(prefix="g_"), nn.HybridSequential(prefix="d_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=8))
    with judge.name_scope():
        judge.add(nn.Dense(32, activation="relu", in_units=8), nn.Dense(1, in_units=32), nn.Activation("sigmoid"))
    net.initialize(mx.init.Xavier())
    judge.initialize(mx.init.Xavier(magnitude=60))
    mxmp.convert(net, dtype)
    mxmp.convert(judge, mxmp.Policy(dtype, low_ops=["Activation"]))
    return net, judge


@pytest.mark.parametrize("dtype", BOTH)
def test_a_second_converted_net_that_the_loss_calls_is_audited_and_cured(dtype):
    net, judge = judged(dtype)
    x, y = mx.nd.random.normal(shape=(64, 8)), mx.nd.random.uniform(shape=(64,)) > 0.5

    def loss(out, y):
        return BCE(judge(out), y)

    found = audit(net, loss, (x, y), apply=True)
    assert found.findings[0].op == "Activation"
    assert audit(net, loss, (x, y)).is_healthy
    assert "d_" in mxmp.explain(judge, x).graphs[0].plan.policy.exclude[0]


def test_audit_writes_no_gradient_of_another_net_nor_of_an_array_of_the_user():
    net, judge = judged("float16")
    plain = nn.Dense(1, in_units=8)
    plain.initialize()
    x, own = mx.nd.random.normal(shape=(16, 8)), mx.nd.ones((16, 8))
    for array in (x, own):
        array.attach_grad()
        array.grad[:] = 7

    def loss(out, *_):
        return judge(out * own).mean() + plain(out + x).mean()

    params = [p for each in (net, judge, plain) for p in each.collect_params().values() if p.grad_req != "null"]
    for param in params:
        param.grad()[:] = 3
    audit(net, loss, (x, []))
    assert all((param.grad().asnumpy() == 3).all() for param in params)
    assert all((array.grad.asnumpy() == 7).all() for array in (x, own))


@pytest.mark.parametrize("dtype", BOTH)
def test_gradients_through_python_code_between_graphs_are_those_of_the_whole(dtype):
    class Whole(gluon.Block):
        def __init__(self):
            super().__init__(prefix="")
            self.first, self.last = nn.Dense(8, in_units=8), nn.Dense(1, in_units=8)

        def forward(self, x):
            return self.last(self.first(self.first(x) * 2).tanh())

    mx.random.seed(3)
    net = Whole()
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.normal(shape=(16, 8))
    with autograd.record():
        out = (net(x) ** 2).mean()
    out.backward()
    expected = {name: param.grad().asnumpy() for name, param in net.collect_params().items()}
    mxmp.convert(net, dtype)
    from mxmp.diagnose.auditing.replays import Replays
    from mxmp.diagnose.networks.frontends import replayed_network

    network = replayed_network(net, lambda y: (y**2).mean(), (x, []), None, None)
    with network.unchanged():
        replays = Replays(network)
        low = replays.run(replays.candidates).gradients
    for name, gradient in expected.items():
        np.testing.assert_allclose(replays.reference.gradients[name], gradient, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(low[name], gradient, rtol=0, atol=0.03 * np.abs(gradient).max())


@pytest.mark.parametrize("dtype", BOTH)
def test_a_teacher_that_the_loss_calls_without_gradients_is_audited_too(dtype):
    net, teacher = mxmp.convert(healthy_net(), dtype), mxmp.convert(healthy_net(), dtype)
    x = mx.nd.random.normal(shape=(16, 8))

    def loss(out):
        with autograd.pause():
            wanted = teacher(x)
        return (out - wanted - 1) ** 2

    found = audit(net, loss, (x, []))
    assert found.is_healthy
    assert found.candidates == 6


def healthy_net():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(16, activation="relu", in_units=8), nn.Dense(2, in_units=16))
    net.initialize(mx.init.Xavier())
    return net
