"""What rounds: outputs, constants and sums of float16 on a CPU, and the shortcut where an operator is exact."""

from __future__ import annotations

import dataclasses

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit.examples import examples
from kit.graphs import graphs, mixed, small
from kit.oracle import S, assert_same_bits, by_symbol, filled, half, nodes, sqnr

import mxmp
from mxmp import Policy
from mxmp.kernels import rounding
from mxmp.kernels.fit import SWITCH
from mxmp.pipeline import low_graph
from mxmp.precision import rules
from mxmp.precision.casts import insert_casts, strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision, Plan, PlannedGraph
from mxmp.precision.rules import rule_of

INF = float("inf")


def pair(values: tuple[float, float]) -> np.ndarray:
    return np.array(values, "float32")


def test_followers_round_their_own_output():
    x = S.FullyConnected(S.var("x"), S.var("w"), no_bias=True, num_hidden=1)
    values = {"x": np.full((1, 1), 2048, "float32"), "w": np.ones((1, 1), "float32")}
    cast = mxmp.cast_symbol(S.dot(x + 1.0, S.ones((1, 1))))
    got = by_symbol(cast, values, train=False)
    np.testing.assert_array_equal(got.outputs[0], [[2048]])


@pytest.mark.parametrize(
    ("make", "op", "x", "expected"),
    [
        (lambda x: x * 0.3, "_mul_scalar", 1002, half(half(0.3) * 1002)),
        (lambda x: 1.1 - x, "_rminus_scalar", 1, half(1.1) - 1),
        (lambda x: x * 1e-3, "_mul_scalar", 60000, half(half(1e-3) * 60000)),
        (lambda x: S.LeakyReLU(x, slope=0.1), "LeakyReLU", -10, half(half(0.1) * -10)),
    ],
)
def test_a_constant_is_float16(make, op, x, expected):
    symbol = make(S.var("x"))
    low = mxmp.cast_symbol(symbol, Policy(low_ops=[op]))
    assert by_symbol(low, {"x": np.array([x], "float32")}).outputs[0] == expected
    assert strip(Graph.from_symbol(low)).to_json() == Graph.from_symbol(symbol).to_json()


def test_a_hard_sigmoid_has_fp32_constants():
    """Rounded ones would give a slope at 2.5 and -2.5, where there is none."""
    low = mxmp.cast_symbol(S.hard_sigmoid(S.var("x")), Policy(low_ops=["hard_sigmoid"]))
    x = half(np.concatenate([np.linspace(-4, 4, 4097), [2.5, -2.5]]))
    got = by_symbol(low, {"x": x}, heads=[np.full(len(x), 3)])
    np.testing.assert_array_equal(got.outputs[0], half(np.clip(np.float32(0.2) * x + np.float32(0.5), 0, 1)))
    np.testing.assert_array_equal(got.grads["x"], half(np.where(np.abs(x) < 2.5, np.float32(0.2) * 3, 0)))


def test_a_sum_of_more_than_four_tensors_rounds_after_each():
    """MXNet adds up to four in FP32."""
    values = {"a": pair((60000, 2048)), "b": pair((60000, 1)), "c": pair((-60000, 1)), "d": pair((0, 1))}
    values["e"] = pair((0, 1))
    for names, expected in (("abc", [60000, 2050]), ("abcd", [60000, 2052]), ("abcde", [INF, 2048])):
        low = mxmp.cast_symbol(S.add_n(*map(S.var, names)), Policy(low_ops=["add_n"]))
        np.testing.assert_array_equal(by_symbol(low, {n: values[n] for n in names}).outputs[0], expected)


@pytest.mark.parametrize("policy", [Policy(), Policy(output="compute"), Policy(exclude=["cat"])], ids=str)
def test_the_shortcut_of_exact_operators_changes_no_bit(policy, monkeypatch):
    symbol = mixed()
    values = filled(symbol, data=(2, 3, 6, 6))
    short = mxmp.cast_symbol(symbol, policy)
    monkeypatch.setattr(rules, "rule_of", lambda op: dataclasses.replace(rule_of(op), exact=False))
    full = mxmp.cast_symbol(symbol, policy)
    assert len(nodes(short)) < len(nodes(full))
    assert_same_bits(by_symbol(short, values), by_symbol(full, values))


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_the_shortcut_changes_no_bit_on_random_graphs(drawn):
    symbol, shapes = drawn
    values = filled(symbol, **shapes)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        # BatchNorm sums in another order where its input is in another memory layout.
        patch.setenv(SWITCH, "unblocked_norms")
        _, decided = low_graph(Graph.from_symbol(symbol), Policy(), "cpu")
        for exact in (True, False):
            if not exact:
                patch.setattr(rules, "rule_of", lambda op: dataclasses.replace(rule_of(op), exact=False))
            low, _ = low_graph(Graph.from_symbol(symbol), decided, "cpu")
            results.append(by_symbol(low.to_symbol(), values))
    assert_same_bits(*results)


def test_bfloat16_casts_are_amp_casts():
    inserted = [n for n in nodes(mxmp.cast_symbol(small(), "bfloat16")) if "__mxmp__" in n.get("attrs", {})]
    assert {n["op"] for n in inserted if "dtype" in n["attrs"]} == {"amp_cast"}
    assert {n["op"] for n in inserted} == {"amp_cast", "_copy", "amp_multicast"}


def gated() -> mx.sym.Symbol:
    """sigmoid, tanh and a difference between two matrix products: operators whose own bfloat16 kernels truncate."""
    x, y = (S.FullyConnected(S.var("data"), num_hidden=32, name=name) for name in "xy")
    gate = S.elemwise_sub(S.sigmoid(x, name="sigmoid"), S.tanh(y, name="tanh"), name="difference")
    return S.FullyConnected(gate, num_hidden=5, name="fc")


def test_bfloat16_computes_truncating_operators_by_ones_that_round():
    low = mxmp.cast_symbol(gated(), "bfloat16", ctx=mx.cpu())
    ops = {n["name"]: n["op"] for n in nodes(low)}
    assert (ops["sigmoid"], ops["tanh"], ops["difference"]) == ("Activation", "Activation", "elemwise_add")
    assert {n["op"] for n in nodes(mxmp.cast_symbol(gated(), "float16", ctx=mx.cpu()))} >= {"sigmoid", "elemwise_sub"}
    values = filled(gated(), data=(64, 16))
    want, got = by_symbol(gated(), values), by_symbol(low, values)
    assert sqnr(want.outputs[0], got.outputs[0]) > 40
    assert all(sqnr(grad, got.grads[name]) > 38 for name, grad in want.grads.items())


def test_a_replaced_operator_is_its_own_again_when_converted_once_more():
    low = mxmp.cast_symbol(gated(), "bfloat16", ctx=mx.cpu())
    again = mxmp.cast_symbol(low, "bfloat16", ctx=mx.cpu())
    assert again.tojson(remove_amp_cast=False) == low.tojson(remove_amp_cast=False)
    other = mxmp.cast_symbol(low, "float16", ctx=mx.cpu())
    straight = mxmp.cast_symbol(gated(), "float16", ctx=mx.cpu())
    assert other.tojson(remove_amp_cast=False) == straight.tojson(remove_amp_cast=False)


def clipped(low: float = 0, high: float = 6) -> mx.sym.Symbol:
    x = S.FullyConnected(S.var("data"), num_hidden=32, name="x")
    return S.FullyConnected(S.clip(x, low, high, name="clip"), num_hidden=5, name="fc")


def test_clip_is_computed_in_two_and_is_its_own_again():
    low = mxmp.cast_symbol(clipped(), "bfloat16", ctx=mx.cpu())
    ops = {n["name"]: n["op"] for n in nodes(low)}
    assert (ops["clip_larger"], ops["clip"]) == ("_maximum_scalar", "_minimum_scalar")
    again = mxmp.cast_symbol(low, "bfloat16", ctx=mx.cpu())
    assert again.tojson(remove_amp_cast=False) == low.tojson(remove_amp_cast=False)
    for other in ("float16", "compute=bfloat16,exclude=x"):
        straight = mxmp.cast_symbol(clipped(), other, ctx=mx.cpu())
        assert mxmp.cast_symbol(low, other, ctx=mx.cpu()).tojson(remove_amp_cast=False) == straight.tojson(
            remove_amp_cast=False
        )


def bound_in_two(graph: Graph) -> Graph:
    low = insert_casts(PlannedGraph(graph, decide(graph, Policy("bfloat16", exclude=["*"]), "cpu")))
    rounding.clip_by_two_bounds(low)
    return low.graph


@pytest.mark.parametrize(("low", "high"), [(0, 6), (-1, 1), (-0.5, 127), (2, 2)])
def test_clip_in_two_has_the_values_and_gradients_of_clip_at_every_bfloat16_number(low, high):
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    every = every[np.isfinite(every)]
    plain = Graph.from_symbol(S.clip(S.var("data"), low, high, name="clip"))
    two = bound_in_two(plain)
    assert [n.op for n in two.nodes()] == ["null", "slice_axis", "_maximum_scalar", "_minimum_scalar"]
    want, got = (by_symbol(g.to_symbol(), {"data": every}) for g in (plain, two))
    np.testing.assert_array_equal(got.outputs[0], want.outputs[0])
    np.testing.assert_array_equal(got.grads["data"], want.grads["data"])


@pytest.mark.parametrize(("low", "high"), [(0, 6), (-1, 1), (-0.5, 127)])
def test_clips_own_bfloat16_kernel_is_exact_where_bfloat16_holds_its_bounds(low, high):
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    every = every[np.isfinite(every) & ((np.abs(every) >= 2.0**-126) | (every == 0))]  # a cast flushes the smallest
    graph = Graph.from_symbol(S.clip(S.var("data"), low, high, name="clip"))
    plan = Plan(Policy("bfloat16"), "cpu", {"clip": Decision("clip", True, "tried")})
    both = (graph.to_symbol(), low_graph(graph, plan, "cpu")[0].to_symbol())
    want, got = (by_symbol(symbol, {"data": every}) for symbol in both)
    np.testing.assert_array_equal(got.outputs[0], want.outputs[0])
    np.testing.assert_array_equal(got.grads["data"], half_of(want.grads["data"]))


def half_of(value: np.ndarray) -> np.ndarray:
    """To bfloat16 and back."""
    return mx.nd.amp_cast(
        mx.nd.amp_cast(mx.nd.array(value), dtype=np.dtype([("bfloat16", np.uint16)])), dtype="float32"
    ).asnumpy()


def test_bounds_that_parsers_may_read_differently_stay_with_clip():
    for low, high in ((-0.3, 0.7), (0, 1e30), (6, 0)):
        graph = bound_in_two(Graph.from_symbol(S.clip(S.var("data"), low, high)))
        assert [n.op for n in graph.nodes()] == ["null", "clip"]


@pytest.mark.parametrize(
    ("scalar", "low"), [(0.5, True), (-1.0, True), (2.0, True), (1.1, False), (0.0, False), (2.0**40, False)]
)
def test_bfloat16_multiplies_low_by_powers_of_two_only(scalar, low):
    scaled = S.FullyConnected(S.var("data"), num_hidden=4, name="fc") * scalar
    graph = Graph.from_symbol(S.FullyConnected(scaled, num_hidden=4, name="fc2"))
    decisions = decide(graph, Policy("bfloat16"), "cpu").decisions
    assert next(d.low for d in decisions.values() if d.op == "_mul_scalar") is low
