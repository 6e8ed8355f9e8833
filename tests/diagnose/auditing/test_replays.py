# ruff: noqa: N803
"""audit of what real programs do: raw digits, frozen weights, dropouts, transposed convolutions, other nets, loops."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.plants.healthy import HEALTHY_TOO, healthy_too
from support.plants.kinds import PLANTS, audited, is_beside
from support.plants.programs import MORE

import mxmp
from mxmp.diagnose import audit

BOTH = ("float16", "bfloat16")
QUICK = {"year": "bfloat16", "day": "float16", "difference of columns": "bfloat16", "sin of a layer": "bfloat16"}
QUICK |= {"argmax gate": "bfloat16", "1013 between layers": "bfloat16", "weights": "float16", "log of a dot": "float16"}


def checked(plant, dtype):
    found = audited(plant, dtype)
    assert not found.is_healthy
    assert "nothing stands out" not in str(found)
    assert is_beside(plant, found.findings[0].name)


@pytest.mark.parametrize("name", QUICK)
def test_a_plant_of_real_programs_is_named_first(name):
    checked(next(plant for plant in MORE if plant.name == name), QUICK[name])


@pytest.mark.parametrize("plant", MORE, ids=lambda plant: f"{plant.kind}, {plant.name}")
@pytest.mark.slow
def test_every_plant_of_real_programs_is_named_first(plant):
    for dtype in plant.dtypes:
        checked(plant, dtype)


def test_there_are_a_hundred_plants_and_fifty_healthy_networks():
    assert len(PLANTS) + len(MORE) >= 100
    assert len(HEALTHY_TOO) >= 25


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    "name", ["mlp, two dropouts", "autoencoder, frozen", "foreach, dropout", "convolutions, frozen"]
)
def test_a_trained_or_frozen_network_is_healthy(name, dtype):
    assert healthy_too(name, dtype).is_healthy


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", HEALTHY_TOO)
@pytest.mark.slow
def test_every_trained_or_frozen_network_is_healthy(name, dtype):
    found = healthy_too(name, dtype)
    assert found.is_healthy
    assert "nothing stands out" in str(found)


BCE = gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=True)


class Twice(gluon.HybridBlock):
    """A layer that is called twice, with a saturating function that is so too."""

    def __init__(self):
        super().__init__(prefix="twice_")
        with self.name_scope():
            self.dense = nn.Dense(8, in_units=8)
            self.gate = nn.Activation("sigmoid")

    def hybrid_forward(self, F, x):
        return self.gate(6 * self.dense(2 * self.gate(self.dense(x))))


class Loop(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="loop_")
        with self.name_scope():
            self.dense = nn.Dense(8, in_units=8)

    def hybrid_forward(self, F, x):
        return F.contrib.foreach(lambda row, state: (F.sigmoid(6 * self.dense(row)), state), x, [])[0]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("kind", "op", "shape"), [(Twice, "Activation", (64, 8)), (Loop, "sigmoid", (4, 16, 8))])
def test_apply_keeps_a_layer_called_twice_and_a_body_of_a_loop_in_fp32(kind, op, shape, dtype):
    np.random.seed(0)
    mx.random.seed(0)
    net = kind()
    net.initialize(mx.init.Xavier(magnitude=6))
    x, y = mx.nd.random.normal(shape=shape), mx.nd.random.uniform(shape=shape) > 0.5
    mxmp.convert(net, mxmp.Policy(dtype, low_ops=[op]))
    found = audit(net, BCE, (x, y), apply=True)
    assert found.applied
    assert audit(net, BCE, (x, y)).is_healthy
    net(x)
    decisions = mxmp.explain(net).graphs[0].plan.decisions
    assert not [name for name, each in decisions.items() if each.low and ("sigmoid" in name or "gate" in name)]


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


def test_gradients_through_python_code_between_graphs_are_those_of_the_whole():
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
    mxmp.convert(net, "float16")
    from mxmp.diagnose.auditing.replays import Replays
    from mxmp.diagnose.networks.frontends import replayed_network

    network = replayed_network(net, lambda y: (y**2).mean(), (x, []), None, None)
    with network.unchanged():
        found = Replays(network).reference.gradients
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-6)


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


class Branch(gluon.HybridBlock):
    """Control flow of each kind, with dropout inside."""

    def __init__(self, kind):
        super().__init__(prefix="branch_")
        self.kind = kind
        with self.name_scope():
            self.dense, self.drop, self.out = nn.Dense(8, in_units=8), nn.Dropout(0.5), nn.Dense(2, in_units=8)

    def hybrid_forward(self, F, x):
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
