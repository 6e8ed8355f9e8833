"""Graphs in float16 for a GPU: their accuracy is that of the emulation, their weights are stored in float16."""

from __future__ import annotations

import json
import os

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import sqnr
from kit.served_networks import batches
from mxnet.gluon import nn

import mxmp
from mxmp.inference.search import FOLDED, PLAIN
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calibration(images):
    return batches(images)


@pytest.fixture(scope="module")
def found(net, calibration):
    return mxmp.optimize_for_inference(net, calibration, dtypes="float16")


def test_norms_are_folded_and_layers_are_float16_with_float16_weights(found):
    nodes = json.loads(found.symbol.tojson(remove_amp_cast=False))["nodes"]
    assert not any("BatchNorm" in node["op"] or "mkldnn" in node["op"] for node in nodes)
    weights = {name: value for name, value in found.arg_params.items() if value.ndim > 1}
    assert len(weights) > 2
    assert {np.dtype(value.dtype).name for value in weights.values()} == {"float16"}
    read = {nodes[source]["name"] for node in nodes if node["op"] == "amp_cast" for source, *_ in node["inputs"]}
    assert read.isdisjoint(found.arg_params)
    assert {layer.dtype for layer in found.report.layers if layer.op in ("Convolution", "FullyConnected")} == {
        "float16"
    }


def test_the_dtypes_of_the_graph_are_those_of_the_report_and_outputs_are_float32(found, calibration):
    outputs = found.symbol.get_internals()
    _, types, _ = outputs.infer_type(data="float32")
    by_name = dict(zip(outputs.list_outputs(), types))
    assert by_name.pop(found.symbol.list_outputs()[0]) is np.float32
    layers = [layer for layer in found.report.layers if f"{layer.name}_output" in by_name]
    assert len(layers) > 5
    for layer in layers:
        assert np.dtype(by_name[f"{layer.name}_output"]).name == layer.dtype


def test_evaluate_gets_the_emulation_and_its_accuracy_is_in_the_report(net, calibration):
    x, outputs = calibration[0], []

    def evaluate(served):
        outputs.append(served(x).asnumpy())
        return 1.0

    report = mxmp.optimize_for_inference(net, calibration, dtypes="float16", evaluate=evaluate).report
    full, half, _ = outputs  # the last one with float16 sums
    np.testing.assert_array_equal(half, half.astype("float16"))
    assert 40 < sqnr(full, half) < 80
    (row,) = [each for each in report.candidates if each.name == "float16"]
    assert row.milliseconds is None
    assert row.score == 1.0
    assert report.chosen == "float16"
    assert "for a GPU" in str(report)
    assert "ms  float" not in str(report)


def test_the_emulation_is_what_a_converted_network_computes(net, calibration):
    """Dense layers alone: no BatchNorm, whose folding moves the roundings."""
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu", in_units=16), nn.Dense(8, in_units=32))
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.normal(shape=(32, 16))
    outputs = []
    mxmp.optimize_for_inference(
        net, [x], dtypes="float16", evaluate=lambda served: outputs.append(served(x).asnumpy()) or 1.0
    )
    np.testing.assert_array_equal(outputs[1], mxmp.convert(net, "float16")(x).asnumpy())


def test_a_layer_that_overflows_in_float16_stays_in_float32():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(64, in_units=64), nn.Dense(64, in_units=64), nn.Dense(8, in_units=64))
    net.initialize(mx.init.Xavier())
    net[0].weight.set_data(net[0].weight.data() * 1e6)  # its outputs leave float16's range
    net[1].weight.set_data(net[1].weight.data() * 1e-6)
    x = mx.nd.random.normal(shape=(32, 64))
    found = mxmp.optimize_for_inference(net, [x], dtypes="float16")
    kept = {layer.name for layer in found.report.layers if layer.dtype == "float32"}
    assert "net_dense0_fwd" in kept
    assert found.report.chosen.startswith("float16, ")
    assert found.arg_params["net_dense2_weight"].dtype == np.float16
    assert found.arg_params["net_dense0_weight"].dtype == np.float32


def test_where_no_layer_is_accurate_enough_the_graph_is_float32_without_onednn(net, calibration):
    found = mxmp.optimize_for_inference(net, calibration, dtypes="float16", min_sqnr=200)
    assert found.report.chosen == "float32, folded"
    assert "no graph with a layer in it is accurate enough" in str(found.report)
    assert {np.dtype(value.dtype).name for value in found.arg_params.values()} == {"float32"}
    x = calibration[0]
    assert sqnr(net(x).asnumpy(), found(x).asnumpy()) > 90
    assert all(not node.op.startswith("_sg") for node in Graph.from_symbol(found.symbol).nodes())


def test_the_plain_network_is_chosen_where_the_folded_graph_fails_and_no_layer_is_float16(failing):
    failing(lambda what, *arguments: (what, arguments[:1]) == ("outputs", (FOLDED,)))
    symbol = mx.sym.sin(mx.sym.var("data"), name="sin")
    report = mxmp.optimize_for_inference(symbol, [{"data": mx.nd.ones((2, 2))}], dtypes="float16").report
    assert (report.chosen, report.baseline) == (PLAIN, PLAIN)
    (row,) = [each for each in report.candidates if each.name == report.chosen]
    assert not row.verdict


def test_its_files_are_half_as_large(found, full, tmp_path):
    sizes = [os.path.getsize(each.export(str(tmp_path / str(i)))[1]) for i, each in enumerate((found, full))]
    assert sizes[0] < 0.6 * sizes[1]


def test_float16_beside_dtypes_for_a_cpu_is_refused(net, calibration):
    with pytest.raises(ValueError, match="mixes float16, for a GPU, with dtypes for a CPU: optimize twice"):
        mxmp.optimize_for_inference(net, calibration, dtypes=["float16", "int8"])
