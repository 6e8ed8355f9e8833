"""Softmax and LayerNorm in float16, where MXNET_SAFE_ACCUMULATION has their kernels sum in FP32."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import cast_nodes
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.diagnose import explain
from mxmp.pipeline import low_graph
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.operators import Options
from mxmp.precision.plan import Plan
from mxmp.precision.safe_sums import VARIABLE
from mxmp.serving.lowering import lower_to_float16

S = mx.sym
FAST = Policy(norm="compute")


@pytest.fixture
def safe(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def cell(norm: dict[str, Any] = {}, softmax: dict[str, Any] = {}) -> mx.sym.Symbol:  # noqa: B006
    """A projection, LayerNorm, a projection to scores, their softmax with dropout, and the product behind it."""
    x = S.FullyConnected(S.var("data"), num_hidden=8, flatten=False, name="fc1")
    x = S.LayerNorm(x, name="norm", **norm)
    x = S.FullyConnected(x, num_hidden=8, flatten=False, name="fc2")
    x = S.Dropout(S.softmax(x, name="softmax", **softmax), name="dropout")
    return S.FullyConnected(x, num_hidden=4, flatten=False, name="fc3")


def low(symbol: mx.sym.Symbol, policy: Policy | None = None, device: str = "gpu", **options: Any) -> set[str]:
    plan = decide(Graph.from_symbol(symbol), policy or FAST, device, Options(**options))
    return {name for name in ("norm", "softmax") if plan.decisions[name].low}


def test_between_float16_they_compute_in_float16_and_the_reason_is_said(safe):
    """On a CPU too, where the emulation shows what a GPU computes."""
    for device in ("cpu", "gpu"):
        plan = decide(Graph.from_symbol(cell()), FAST, device)
        for name in ("norm", "softmax"):
            assert plan.decisions[name].low
            assert plan.decisions[name].reason.endswith("sums in FP32 (MXNET_SAFE_ACCUMULATION=1)")


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_without_the_variable_they_compute_in_fp32(value, monkeypatch):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert [low(cell(), device=device) for device in ("cpu", "gpu")] == [set(), set()]


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_each_text_that_mxnet_takes_for_true_counts(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    assert low(cell()) == {"norm", "softmax"}


def test_layer_norm_needs_a_policy_that_leaves_norms_without_casts(safe):
    """Its kernel reads gamma and beta in float16, which a cast to FP32 does not."""
    assert low(cell(), Policy()) == low(cell(), Policy(norm="float32")) == {"softmax"}


def test_gamma_and_beta_are_stored_in_float16_as_the_kernel_reads_them_so(safe):
    names = cell().list_arguments()[1:]
    plan = decide(Graph.from_symbol(cell()), FAST, "gpu", Options(parameters=names))
    assert plan.low_variables == set(names)


@pytest.mark.parametrize(
    ("attrs", "stays"),
    [
        ({"norm": {"axis": 1}}, "norm"),  # MXNet sums in float16 there, with the variable as without it
        ({"softmax": {"temperature": 0.1}}, "softmax"),
        ({"softmax": {"dtype": "float32"}}, "softmax"),
    ],
)
def test_what_a_kernel_would_round_or_sum_in_float16_stays_fp32(attrs, stays, safe):
    assert low(cell(**attrs)) == {"norm", "softmax"} - {stays}


@pytest.mark.parametrize(
    "policy",
    [
        Policy(norm="compute", full_ops=["softmax", "LayerNorm"]),
        Policy(norm="compute", exclude=["softmax", "norm"]),
        Policy("bfloat16"),
    ],
    ids=str,
)
def test_the_policy_has_the_last_word(policy, safe):
    assert low(cell(), policy, "cpu") == set()


def test_an_output_of_the_graph_and_what_fp32_reads_is_not_rounded(safe):
    scores = S.FullyConnected(S.var("data"), num_hidden=8, name="fc")
    assert low_in(S.softmax(scores, name="softmax")) == {"fc"}
    weights = S.softmax(scores, name="softmax")
    assert low_in(S.Group([S.exp(weights), S.FullyConnected(weights, num_hidden=2, name="next")])) == {"fc", "next"}
    assert low_in(S.softmax(S.exp(scores), name="softmax")) == {"fc"}


def masked(**attrs: Any) -> mx.sym.Symbol:
    """Attention's weights under a mask that is data, and the product behind them."""
    scores = S.FullyConnected(S.var("data"), num_hidden=4, flatten=False, name="scores")
    under = S.reshape(S.broadcast_add(scores, S.var("mask", shape=(3, 1)), name="under"), shape=(0, 0), name="rows")
    weights = S.Dropout(S.softmax(under, name="softmax", **attrs), p=0.0, name="dropout")
    return S.FullyConnected(weights, num_hidden=2, name="values")


def test_a_softmax_of_fp32_under_a_mask_that_is_data_returns_float16_without_a_cast(monkeypatch):
    """The sum with the mask stays FP32: -1e9 is -inf in float16, and a row of -inf has the softmax NaN."""
    around = ["data_to_float16", "scores_to_float32", "softmax_to_float16", "values"]
    assert cast_nodes(mxmp.cast_symbol(masked(), "float16", ctx=mx.gpu())) == around
    monkeypatch.setenv(VARIABLE, "1")
    assert low_in(masked()) == {"scores", "softmax", "dropout", "values"}
    found = mxmp.cast_symbol(masked(), "float16", ctx=mx.gpu())
    assert cast_nodes(found) == [name for name in around if name != "softmax_to_float16"]
    dtypes = dict(zip(found.list_arguments(), found.infer_type(data="float32")[0]))
    assert dtypes["mask"] == dtypes["data"] == np.float32
    assert strip(Graph.from_symbol(found)).to_json() == strip(Graph.from_symbol(masked())).to_json()


@pytest.mark.parametrize(
    ("policy", "attrs"),
    [
        (Policy(exclude=["softmax"]), {}),
        (Policy(full_ops=["softmax"]), {}),
        (Policy(), {"temperature": 2.0}),
        (Policy(), {"dtype": "float32"}),
    ],
    ids=str,
)
def test_a_softmax_under_a_mask_stays_fp32_where_one_between_float16_does(policy, attrs, safe):
    found = Graph.from_symbol(mxmp.cast_symbol(masked(**attrs), policy, ctx=mx.gpu()))
    (softmax,) = (node for node in found.nodes() if node.op == "softmax")
    assert softmax.attrs == {name: str(value) for name, value in attrs.items()}


def test_low_ops_reads_float16_under_a_mask_as_it_says(safe):
    found = cast_nodes(mxmp.cast_symbol(masked(), Policy(low_ops=["softmax"]), ctx=mx.gpu()))
    assert found == ["data_to_float16", "scores_to_float32", "rows_to_float16", "values"]


def test_a_softmax_of_data_keeps_its_cast_as_mxnet_would_take_the_data_for_float16(safe):
    symbol = S.FullyConnected(S.softmax(S.var("data"), name="softmax"), num_hidden=2, name="values")
    found = mxmp.cast_symbol(symbol, "float16", ctx=mx.gpu())
    assert cast_nodes(found) == ["softmax_to_float16", "values"]


@pytest.mark.parametrize("lowest", [-1e4, -1e9, -np.inf])
def test_rows_under_a_mask_have_fp32s_softmax_whatever_it_adds(lowest, safe):
    """A row under nothing but -1e4 or -1e9 too: in float16 it would be another or NaN."""
    rng = np.random.RandomState(0)
    wide = S.reshape(S.broadcast_add(dense(S.var("data"), "scores"), S.var("mask")), shape=(0, 0))
    symbol = dense(S.softmax(wide, name="softmax"), "values")
    values = {
        name: rng.randn(*shape).astype("float32")
        for name, shape in zip(symbol.list_arguments(), symbol.infer_shape(data=(3, 5), mask=(3, 4))[0])
    }
    values["mask"] = np.array([[0, 0, lowest, lowest], [0] * 4, [max(lowest, -1e9)] * 4], "float32")
    results = []
    for each in (symbol, mxmp.cast_symbol(symbol, "float16", ctx=mx.cpu())):
        bound = each.bind(
            mx.cpu(),
            {n: mx.nd.array(v) for n, v in values.items()},
            {n: mx.nd.zeros(v.shape) for n, v in values.items()},
        )
        out = bound.forward(is_train=True)[0]
        bound.backward(mx.nd.ones(out.shape))
        results.append([out.asnumpy(), *(bound.grad_dict[n].asnumpy() for n in sorted(values))])
    for want, got in zip(*results):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=4e-3)


def dense(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    return S.FullyConnected(data, num_hidden=4, name=name)


def low_in(symbol: mx.sym.Symbol) -> set[str]:
    plan = decide(Graph.from_symbol(symbol), Policy(), "gpu")
    return {name for name, decision in plan.decisions.items() if decision.low}


def test_a_plan_that_was_made_with_the_variable_sums_in_fp32_without_it(monkeypatch):
    graph = Graph.from_symbol(cell())
    without = low_graph(graph, FAST, "gpu")[0].to_json()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        text, made = low_graph(graph, FAST, "gpu")[1].to_json(), low_graph(graph, FAST, "gpu")[0].to_json()
        again, plan = low_graph(graph, Plan.from_json(text), "gpu")
        assert again.to_json() == made != without
        assert plan.decisions["softmax"].low
    again, plan = low_graph(graph, Plan.from_json(text), "gpu")
    assert again.to_json() == without
    assert "is not set here" in plan.decisions["softmax"].reason
    report = explain(cell(), policy=Plan.from_json(text))
    assert {node.dtype for node in report.nodes if node.name in ("norm", "softmax")} == {"float32"}


def test_a_plan_without_them_is_followed_where_the_variable_is_set(monkeypatch):
    graph = Graph.from_symbol(cell())
    want, plan = low_graph(graph, FAST, "gpu")
    monkeypatch.setenv(VARIABLE, "1")
    got, used = low_graph(graph, plan, "gpu")
    assert used is plan
    assert got.to_json() == want.to_json()


def test_low_ops_of_a_plan_need_no_variable():
    graph = Graph.from_symbol(cell())
    plan = decide(graph, Policy(low_ops=["softmax"]), "gpu")
    assert low_graph(graph, Plan.from_json(plan.to_json()), "gpu")[1].decisions["softmax"].low


def test_a_net_follows_such_a_plan_in_fp32(monkeypatch):
    def net() -> nn.HybridSequential:
        layers = nn.HybridSequential(prefix="net_")
        with layers.name_scope():
            layers.add(nn.Dense(8, in_units=4), nn.LayerNorm(in_channels=8), nn.Dense(2, in_units=8))
        layers.initialize()
        return layers

    x = mx.nd.ones((2, 4))
    mx.nd.waitall()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        first = mxmp.convert(net(), "float16-fast")
        first(x).wait_to_read()
        (report,) = explain(first).graphs
        assert report.plan.decisions["net_layernorm0_layernorm0"].low
    second = mxmp.convert(net(), report.plan)
    second(x).wait_to_read()
    (now,) = explain(second).graphs
    assert not now.plan.decisions["net_layernorm0_layernorm0"].low


def test_a_graph_to_serve_elsewhere_does_not_depend_on_the_variable(monkeypatch):
    graph, shapes = Graph.from_symbol(cell()), cell().infer_shape(data=(2, 3, 8))[0]
    params = {n: np.ones(shape, "float32") for n, shape in zip(cell().list_arguments(), shapes) if n != "data"}
    params = {name: mx.nd.array(value) for name, value in params.items()}
    mx.nd.waitall()
    without = lower_to_float16(graph, params, (), "gpu")
    monkeypatch.setenv(VARIABLE, "1")
    served = lower_to_float16(graph, params, (), "gpu")
    assert served[0].to_json() == without[0].to_json()
    assert served[2] == without[2]
