"""``explain`` names the workarounds for the kernels, at each operator and in all."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.oracle import S
from kit.twins import seeded
from mxnet import autograd, gluon

import mxmp
from mxmp.kernels.fit import SWITCH


def gated() -> mx.sym.Symbol:
    x = S.tanh(S.FullyConnected(S.var("data"), num_hidden=4, name="first"), name="gate")
    return S.FullyConnected(x, num_hidden=3, name="last")


def test_each_operator_and_variable_names_its_workarounds(monkeypatch):
    monkeypatch.setenv("MXMP_WITHOUT", "emulated_bfloat16")  # which not every CPU needs
    (report,) = mxmp.explain(gated(), policy="bfloat16").graphs
    assert report.workarounds["rounding_operators"] == ("gate",)
    assert report.workarounds["untrained_weights"] == ("first", "last")
    assert set(report.workarounds["amp_cast"]) >= {"data", "first_weight", "last_weight"}
    assert {node.name: node.workarounds for node in report.nodes}["gate"] == ("rounding_operators",)
    assert "rounding_operators" in str(report)


def test_float16_on_a_gpu_needs_none():
    assert mxmp.explain(gated(), policy="float16", ctx=mx.gpu()).graphs[0].workarounds == {}


def test_what_is_known_of_a_net_is_left_out():
    """Its weights are trained, so no gradient of a bias is left unwritten."""
    net = seeded(gluon.nn.Dense(4, in_units=6))
    mxmp.convert(net, "bfloat16")
    with autograd.record():
        net(mx.nd.ones((2, 6)))
    assert "untrained_weights" not in mxmp.explain(net).graphs[0].workarounds


class Loop(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.before = gluon.nn.Dense(6, in_units=6, flatten=False)
            self.inside = gluon.nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        def body(row, state):
            return F.clip(self.inside(row), -1, 1), state

        x = self.before(x)
        return F.contrib.foreach(body, x, [F.zeros_like(x)])[0]


@pytest.mark.parametrize("exclude", [(), ["*dense1*"]], ids=["low", "FP32"])
def test_the_body_of_a_loop_names_those_that_it_runs(exclude):
    net = mxmp.convert(seeded(Loop()), "bfloat16", exclude=exclude)
    with autograd.record():
        net(mx.nd.ones((3, 2, 6)))
    named = set(mxmp.explain(net).graphs[0].workarounds)
    assert named & {"untrained_weights", "clip_by_bounds"} == {"clip_by_bounds"}


@pytest.mark.parametrize("fixed", [[], ["first_weight"]])
def test_a_module_knows_which_weights_are_trained(fixed):
    module = mxmp.Module(gated(), label_names=None, fixed_param_names=fixed, policy="bfloat16")
    module.bind([("data", (2, 6))])
    (report,) = mxmp.explain(module).graphs
    assert report.workarounds.get("untrained_weights", ()) == (("first",) if fixed else ())


def test_what_is_switched_off_is_not_named(monkeypatch):
    monkeypatch.setenv(SWITCH, "rounding_operators")
    assert "rounding_operators" not in mxmp.explain(gated(), policy="bfloat16").graphs[0].workarounds


def test_the_workarounds_within_a_loop_have_its_name_as_a_prefix():
    def body(x, states):
        layer = S.Convolution(x, kernel=(3, 3), num_filter=4, no_bias=True, name="conv")
        return S.Convolution(S.sigmoid(layer, name="gate"), kernel=(1, 1), num_filter=4, name="conv2"), states

    outputs, _ = S.contrib.foreach(body, S.var("data"), [S.var("state")], name="loop")
    (report,) = mxmp.explain(outputs, policy="bfloat16").graphs
    (gate,) = [node for node in report.nodes if node.op == "sigmoid"]
    assert gate.name.endswith("/gate")
    assert gate.name in report.workarounds["rounding_operators"]
    assert "rounding_operators" in gate.workarounds
