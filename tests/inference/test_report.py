"""The report: every candidate and operator, as data, text and picture."""

from __future__ import annotations

import json
import math

import mxnet as mx
import pytest
from kit.served_networks import LOW, S, conv, filled, relu
from mxnet.gluon import nn

import mxmp
from mxmp.inference.report import Candidate, InferenceReport
from mxmp.inference.runner import Runner

pytestmark = pytest.mark.slow


@pytest.mark.bfloat16_kernels
@pytest.mark.vnni
def test_all_candidates_are_in_the_report(found):
    report = found.report
    rows = {row.name: row for row in report.candidates}
    assert {"float32", "float32, folded", "float32, fused", "bfloat16", "int8"} <= set(rows)
    assert rows["bfloat16"].sqnr > 35
    assert rows["int8"].sqnr > 15
    assert set(report.calibrators) == {"min/max", "entropy", "percentile 99.99"}
    assert report.baseline.startswith("float32")
    if not report.chosen.startswith("float32"):
        assert rows[report.chosen].gain[0] > 1
    text = str(report)
    assert f"* {report.chosen}" in text
    assert "times as fast" in text


def test_the_report_is_data_and_a_picture(found, tmp_path):
    found.report.save(str(tmp_path / "report.json"))
    raw = json.loads((tmp_path / "report.json").read_text())
    assert raw["chosen"] == found.report.chosen
    assert len(raw["layers"]) == len(found.report.layers) > 0
    pytest.importorskip("matplotlib")
    found.report.plot(str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="is no picture"):
        found.report.plot("picture.txt")


def test_the_picture_has_infinity_above_all_and_names_in_a_legend():
    pytest.importorskip("matplotlib")
    found = {"float32": (1.3, math.inf), "float32, fused": (0.8, 137.0), "int8": (0.3, 25.0), "bfloat16": (None, None)}
    rows = [Candidate(name, time, sqnr=ratio) for name, (time, ratio) in found.items()]
    (axis,) = InferenceReport("int8", "float32, fused", rows, [], {}, []).plot().axes
    heights = {line.get_label(): line.get_ydata()[0] for line in axis.lines}
    assert heights["float32"] > heights["float32, fused"] == 137
    ticks = dict(zip(axis.get_yticks(), (text.get_text() for text in axis.get_yticklabels())))
    assert ticks[heights["float32"]] == "∞"
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["float32", "float32, fused", "int8"]
    assert not axis.texts


def test_the_picture_names_the_height_of_the_only_finite_dot():
    pytest.importorskip("matplotlib")
    rows = [Candidate("float32", 1.3, sqnr=math.inf), Candidate("float32, fused", 0.8, sqnr=137.34)]
    (axis,) = InferenceReport("float32, fused", "float32, fused", rows, [], {}, []).plot().axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["137.3", "∞"]


def test_the_report_names_what_is_fused_and_says_why_of_every_operator(found):
    fused = [layer for layer in found.report.layers if layer.fused]
    assert all(layer.op.startswith("_sg_mkldnn") and layer.name == layer.fused[-1] for layer in fused)
    assert all(layer.why for layer in found.report.layers)
    assert not any(line.endswith(": ") for line in str(found.report).splitlines())


def test_a_fused_convolution_is_named_by_its_own_name_first():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(8, 3, prefix="conv_"), nn.Activation("relu", prefix="relu_"))
    net.initialize()
    x = mx.nd.ones((2, 3, 8, 8))
    net(x)
    report = mxmp.optimize_for_inference(net, [x], dtypes=()).report
    (layer,) = (layer for layer in report.layers if layer.op == "_sg_mkldnn_conv")
    assert layer.fused == ("conv_fwd", "relu_fwd")
    assert layer.why == "the graph that is served is FP32"
    assert "float32   conv_fwd + relu_fwd: the graph that is served is FP32" in str(report)


@pytest.mark.parametrize("dtype", LOW)
def test_the_report_knows_operators_with_several_outputs(dtype, monkeypatch):
    ask = Runner.ask

    def with_times(self, what, *arguments):
        if what == "times":
            return {name: [1.0 if name == dtype else 2.0] * 4 for name in arguments[0]}
        return ask(self, what, *arguments)

    monkeypatch.setattr(Runner, "ask", with_times)
    parts = S.split(relu(conv(S.var("data"), "stem"), "relu"), num_outputs=2, axis=1, name="parts")
    symbol = S.concat(conv(parts[0], "left"), conv(parts[1], "right"), dim=1)
    params = filled(symbol, data=(4, 3, 8, 8))
    data = [mx.nd.random.normal(shape=(4, 3, 8, 8)) for _ in range(2)]
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params, dtypes=dtype, min_sqnr=0)
    assert found.report.chosen == dtype
    layers = {layer.name: layer for layer in found.report.layers}
    assert all(layer.milliseconds is not None for layer in layers.values())
    assert layers["parts" if dtype == "bfloat16" else "data_quantize"].dtype == dtype
