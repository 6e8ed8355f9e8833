"""``explain`` names operators, their plans and the workarounds for the kernels; what it does not take is refused."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.modules import SHAPES, bound, bucketing, mlp
from kit.oracle import S
from kit.twins import POLICIES, seeded
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


def test_explain_names_operators_of_a_policy_that_change_nothing():
    x = mx.sym.var("x")
    product = mx.sym.FullyConnected(mx.sym.clip(x, 0, 6), num_hidden=4)
    policy = mxmp.Policy("bfloat16", low_ops=["clip", "softmax", "FullyConnected"], full_ops=["exp"])
    (graph,) = mxmp.explain(product, policy=policy, ctx=mx.cpu()).graphs
    exp, clip, softmax = sorted(graph.without_effect)
    assert clip.startswith("low_ops=clip: it stays in FP32, as the bfloat16 CPU kernel of clip is")
    assert (exp, softmax) == ("full_ops=exp: the graph has none", "low_ops=softmax: the graph has none")
    assert f"Without effect\n    {softmax}" in str(graph)
    (graph,) = mxmp.explain(product, policy="bfloat16", ctx=mx.cpu()).graphs
    assert graph.without_effect == ()
    assert "Without effect" not in str(graph)


def test_explain_shows_the_plan_that_runs_in_a_net():
    net = mx.gluon.nn.Dense(3, in_units=2)
    net.initialize()
    mxmp.convert(net)
    (report,) = mxmp.explain(net, mx.nd.ones((1, 2))).graphs
    assert [d.op for d in report.plan.decisions.values() if d.low] == ["FullyConnected"]
    assert report.plan is mxmp.explain(net).graphs[0].plan


# MXNet's own Module leaves the states file open when it reads it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("kind", ["Module", "BucketingModule"])
@pytest.mark.parametrize("policy", POLICIES)
def test_explain_takes_a_module(policy, kind):
    module = mxmp.Module(mlp(), policy=POLICIES[policy]) if kind == "Module" else bucketing(policy=POLICIES[policy])
    bound(module)
    report = mxmp.explain(module)
    twin = mxmp.explain(mlp(), policy=POLICIES[policy])
    operators = [(node.op, node.dtype) for node in report.nodes]
    assert operators == [(node.op, node.dtype) for node in twin.nodes]
    assert set(report.graphs[0].low_params) == (set(SHAPES) if policy == "float16 masters" else set())
    assert "fc1" in "".join(node.name for node in report.nodes)
    assert report.cast_bytes is not None
    assert str(report)


def test_explain_of_a_module_that_is_not_bound_says_to_bind():
    with pytest.raises(ValueError, match="bind"):
        mxmp.explain(mxmp.Module(mlp()))


def test_explain_of_a_plain_module_says_what_it_takes():
    with pytest.raises((TypeError, ValueError), match=r"mxmp\.Module|Symbol"):
        mxmp.explain(bound(mx.mod.Module(mlp())))


@pytest.mark.parametrize(
    "keywords", [{"policy": "bfloat16"}, {"exclude": ["fc*"]}, {"ctx": mx.cpu()}, {"data": (1, 2)}]
)
def test_explain_refuses_for_a_module_what_is_for_symbols(keywords):
    module = mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc"), label_names=None)
    module.bind([("data", (2, 3))], for_training=False)
    with pytest.raises(ValueError, match="are for Symbols"):
        mxmp.explain(module, **keywords)


def test_explain_refuses_what_stands_by_position_after_a_symbol_or_a_module():
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    with pytest.raises(ValueError, match=r"after a Symbol, got NDArray, str: name the shapes.*data="):
        mxmp.explain(symbol, mx.nd.ones((2, 3)), "bfloat16")
    module = mxmp.Module(symbol, label_names=None)
    module.bind([("data", (2, 3))], for_training=False)
    with pytest.raises(ValueError, match=r"after a module, got NDArray: .*explain\(module\)"):
        mxmp.explain(module, mx.nd.ones((2, 3)))


def test_a_net_without_a_prefix_is_titled_by_its_class():
    net = gluon.nn.HybridSequential(prefix="")
    net.add(gluon.nn.Dense(3))
    net.initialize()
    x = mx.nd.ones((4, 5))
    assert str(mxmp.explain(mxmp.convert(net), x)).startswith("HybridSequential (compute=float16, cpu, inference)")
    assert str(mxmp.diagnose.advise(net, x)).startswith("HybridSequential (compute=float16)")
