"""The graph for a device: native where MXNet has kernels, bfloat16 on a CPU."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from mxnet.gluon import nn
from oracle import S, by_gluon, by_symbol, filled, graphs, native, nodes, sqnr

import mxmp
from mxmp import Policy
from mxmp.precision import devices
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import PlannedGraph
from mxmp.precision.rules import missing_kernel


def small() -> mx.sym.Symbol:
    x = S.relu(S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, name="c"), name="r")
    return S.FullyConnected(S.exp(x), num_hidden=5, name="fc")


def test_the_context_of_the_moment_is_the_default():
    symbol = small()
    with mx.gpu():
        assert mxmp.cast_symbol(symbol, "params=float32").tojson() == native(symbol).tojson()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_bfloat16_is_low_only_where_no_kernel_is_missing(drawn):
    graph = Graph.from_symbol(drawn[0])
    planned = PlannedGraph(graph, decide(graph, Policy("bfloat16", norm="compute"), "cpu"))
    for node, decision in planned.decisions.items():
        assert not decision.low or not missing_kernel(node.op, node.attrs, "bfloat16", "cpu")


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


@pytest.mark.parametrize(
    ("scalar", "low"), [(0.5, True), (-1.0, True), (2.0, True), (1.1, False), (0.0, False), (2.0**40, False)]
)
def test_bfloat16_multiplies_low_by_powers_of_two_only(scalar, low):
    graph = Graph.from_symbol(S.FullyConnected(S.var("data"), num_hidden=4, name="fc") * scalar)
    decisions = decide(graph, Policy("bfloat16"), "cpu").decisions
    assert next(d.low for d in decisions.values() if d.op == "_mul_scalar") is low


def test_bfloat16_runs_grouped_convolutions_after_inference_in_fp32():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 3, padding=1, groups=4, in_channels=32), nn.Conv2D(32, 3, groups=32, in_channels=32))
    net.initialize()
    net.hybridize()
    x = np.random.normal(0, 1, (2, 32, 12, 12)).astype("float32")
    want = by_gluon(net, [x], train=False).outputs[0]
    mxmp.convert(net, "bfloat16")
    got = by_gluon(net, [x], train=False).outputs[0]
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()
    assert np.isfinite(by_gluon(net, [x]).outputs[0]).all()


def test_bfloat16_warns_once_on_a_cpu_without_its_instructions(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx2 avx512f\n")
    with pytest.warns(UserWarning, match="neither AVX512-BF16 nor AMX"):
        devices._warn_of_slow_bfloat16(str(cpuinfo))
    devices._warn_of_slow_bfloat16(str(cpuinfo))
    fast = tmp_path / "fast"
    fast.write_text("flags : fpu avx512_bf16\n")
    devices._warn_of_slow_bfloat16(str(fast))
    devices._warn_of_slow_bfloat16(str(tmp_path / "none"))
