"""The graph for a device: native where MXNet has kernels, bfloat16 on a CPU."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from mxnet.gluon import nn
from oracle import S, by_gluon, graphs, native, nodes

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
