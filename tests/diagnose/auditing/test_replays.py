# ruff: noqa: N803
"""audit of what real programs do: raw digits, frozen weights, dropouts, transposed convolutions, other nets, loops."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
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


def test_no_replay_returns_a_weight_itself(monkeypatch):
    """oneDNN's Deconvolution changes its weight while it runs: a reader of it was wrong, or crashed, now and then."""
    symbols, make = [], mx.nd.CachedOp
    monkeypatch.setattr(mx.nd, "CachedOp", lambda symbol, *args: symbols.append(symbol) or make(symbol, *args))
    healthy_too("generator", "float16")
    assert any("Deconvolution" in symbol.tojson() for symbol in symbols)
    assert [name for symbol in symbols for name in {*symbol.list_outputs()} & {*symbol.list_inputs()}] == []
