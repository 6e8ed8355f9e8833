"""The search: layers leave INT8 or a low dtype until the answers are right enough."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import sqnr
from kit.served_networks import S, batches, filled
from mxnet.gluon import nn

import mxmp
from mxmp.host import cpu
from mxmp.inference import calibration
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow


@pytest.mark.bfloat16_kernels
@pytest.mark.vnni
def test_layers_that_leave_int8_compute_in_bfloat16(net, images):
    """Of INT8 graphs only the first, with all layers in it, is refused."""
    counts, low = [], []

    def evaluate(served):
        counts.append(served.symbol.tojson(remove_amp_cast=False).count('"name": "quantized_'))
        if counts[-1]:
            low.append(sum("bfloat16" in str(param.dtype) for param in served.collect_params().values()))
        return float(counts[-1] < max(counts) or not counts[-1])

    report = mxmp.optimize_for_inference(net, batches(images), evaluate=evaluate, max_drop=0.5).report
    (row,) = [row for row in report.candidates if row.name.startswith("int8, ") and row.name.endswith("in bfloat16")]
    assert not row.verdict
    assert max(low) > 0


@pytest.mark.vnni
def test_layers_leave_int8_until_evaluate_is_content(net, images, held):
    asked = []

    def evaluate(served):
        """Loses as soon as the first convolution is in INT8."""
        operators = [node.name for node in Graph.from_symbol(served.symbol).nodes()]
        asked.append(operators)
        return 0.0 if any(name.startswith("quantized_digits_relu0") for name in operators) else 1.0

    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["int8"], evaluate=evaluate, max_drop=0.5)
    rows = {row.name: row for row in found.report.candidates}
    assert rows["int8"].verdict == "loses 1"
    assert any(name.startswith("int8, ") and not row.verdict for name, row in rows.items())
    assert sqnr(held[2], found(held[0]).asnumpy()) > 15


@pytest.mark.vnni
def test_where_nothing_is_right_enough_it_says_so(net, images, held):
    found = mxmp.optimize_for_inference(net, batches(images), min_sqnr=90)
    assert found.report.chosen.startswith("float32")
    assert any("no graph with a layer in it is accurate" in note for note in found.report.notes)
    assert sqnr(held[2], found(held[0]).asnumpy()) > 110


def test_without_vnni_int8_is_left_out(net, images, monkeypatch):
    monkeypatch.setattr(cpu, "lacks", lambda *_: True)
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["int8"])
    assert any("no VNNI" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


def test_without_avx512_bfloat16_is_left_out(net, images, monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["bfloat16"])
    assert any("bfloat16 was left out" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


def test_a_network_whose_own_outputs_are_nan_is_refused():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.HybridLambda(lambda math, x: math.sqrt(-1 - x * x)))
    net.initialize()
    with pytest.raises(ValueError, match="own FP32 outputs on the calibration data hold NaN"):
        mxmp.optimize_for_inference(net, [mx.nd.ones((2, 2))])


def test_equal_infinities_are_no_noise():
    masked = np.array([1.0, -np.inf, 2.0])
    assert calibration.sqnr(masked, masked) == np.inf
    assert calibration.sqnr(masked, np.array([1.1, -np.inf, 2.0])) > 20
    assert calibration.sqnr(masked, np.array([1.0, 5.0, 2.0])) == -np.inf


@pytest.mark.vnni
def test_a_product_with_a_parameter_leaves_the_other_layers_in_int8():
    """MXNet's full mode would quantize the product, and fail. The shape of its parameter is that of the value alone."""
    layers = S.relu(S.FullyConnected(S.var("data"), num_hidden=16, name="first"))
    layers = S.FullyConnected(layers, num_hidden=16, name="second")
    params = {name: value for name, value in filled(layers, data=(32, 16)).items() if name != "data"}
    params["scale"] = mx.nd.full((1, 16), 2)
    data = [mx.nd.random.normal(shape=(32, 16)) for _ in range(2)]
    symbol = S.broadcast_mul(layers, S.var("scale"), name="product")
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params)
    (row,) = (row for row in found.report.candidates if row.name == "int8")
    assert 15 < row.sqnr < 100
