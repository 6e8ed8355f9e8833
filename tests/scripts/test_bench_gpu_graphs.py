"""Casts, bytes and operators of a GPU's graphs, against those counted by hand, and the page that is made of them."""

from __future__ import annotations

import json

import pytest
from mxnet import gluon
from mxnet.gluon import nn
from pages import gpu_graphs as make_gpu_graphs_page
from sweep import gpu_graphs as bench_gpu_graphs

pytest.importorskip("gluoncv", reason="needs GluonCV: pip install 'mxmp[vision]'")
pytest.importorskip("gluonnlp", reason="needs GluonNLP: pip install 'mxmp[nlp]'")

from zoo import catalogue
from zoo.case import Case, images

# (128, 3, 224, 224) -> conv (128, 4, 224, 224) -> norm -> relu -> conv (128, 2, 224, 224)
PIXELS = 128 * 224 * 224
WEIGHTS = 4 * 3 + 2 * 4


def conv_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(2, 1, use_bias=False))
    return net


class Python(gluon.Block):
    """A network in Python around one that is a graph."""

    def __init__(self):
        super().__init__()
        self.inner = conv_net()

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("make", [conv_net, Python])
def test_counts_are_those_by_hand(make):
    case = Case("small", "classification", make, lambda: [images(2, 3, 8, 8)])
    found = bench_gpu_graphs.counts(case, bench_gpu_graphs.VARIANTS)
    variants = found["variants"]
    assert found["inputs"] == {"data": [128, 3, 224, 224]}
    assert found["written"] == 4 * PIXELS * (4 + 4 + 4 + 2)
    around = 6 * PIXELS * (3 + 2)  # what comes in and what goes out
    expected = {"float32": (0, 0), "float16": (4, around + 6 * PIXELS * 8), "float16-fast": (2, around)}
    for variant, counts in expected.items():
        assert (variants[variant]["casts"], variants[variant]["cast_bytes"]) == counts
    # Convolution, BatchNorm, Activation, Convolution, and the gradient of each.
    plain = variants["float32"]["operators"]
    assert 8 <= plain <= 11
    assert variants["float16"]["operators"] == plain + 4 + 3  # the gradient of the data is not asked for
    assert variants["float16-fast"]["operators"] == plain + 2 + 1
    amp = variants["contrib.amp"]
    assert (amp["casts"], amp["cast_bytes"]) == (4, around + 6 * WEIGHTS)


def test_the_step_is_mxnet_s_with_a_check_that_does_not_grow():
    assert bench_gpu_graphs.step_operators(0, 80, "float32") == 20  # four weights an operator
    assert bench_gpu_graphs.step_operators(0, 80, "contrib.amp") == 21
    small, large = (bench_gpu_graphs.step_operators(half, half, "float16") for half in (40, 80))
    assert large - small == pytest.approx(20, abs=2)


def test_a_sweep_goes_on_where_it_ended_and_makes_a_page(tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.CASES, "vgg11", "a reason")
    path = tmp_path / "graphs.json"
    counted = {"casts": 1, "cast_bytes": 1.0, "operators": 1, "step": 1}
    before = {name: counted for name in bench_gpu_graphs.VARIANTS if name != "contrib.amp"}
    path.write_text(json.dumps({"alexnet": {"error": "kept"}, "cifar_resnet20_v1": {"variants": before}}))
    bench_gpu_graphs.main(["cifar_resnet20_v1", "alexnet", "vgg11", "--results", str(path)])
    results = json.loads(path.read_text())
    assert results["alexnet"] == {"error": "kept"}
    assert {name: results["cifar_resnet20_v1"]["variants"][name] for name in before} == before
    assert results["cifar_resnet20_v1"]["variants"]["contrib.amp"]["casts"] > 20
    assert results["vgg11"] == {"left_out": "a reason"}
    assert results["cifar_resnet20_v1"]["inputs"] == {"data": [128, 3, 32, 32]}
    assert results["cifar_resnet20_v1"]["variants"].keys() == set(bench_gpu_graphs.VARIANTS)
    text = make_gpu_graphs_page.page(results)
    assert "## 1 networks" in text
    assert "| `alexnet` |  | kept |" in text
    picture = tmp_path / "graphs.png"
    make_gpu_graphs_page.picture({"resnet50_v1b": results["cifar_resnet20_v1"]}, picture)
    assert picture.stat().st_size > 10_000


def test_a_name_that_no_network_has_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"no network is called 'nn\.Dense'"):
        bench_gpu_graphs.main(["nn.Dense", "--results", str(tmp_path / "graphs.json")])


def test_the_model_is_bytes_over_bandwidth_and_launches_times_latency():
    figures = {"cast_bytes": 9e9, "operators": 90, "step": 10}
    assert make_gpu_graphs_page.cast_seconds(figures, "V100") == pytest.approx(0.020)
    assert make_gpu_graphs_page.cast_seconds(figures, "A100") == pytest.approx(0.020 * 900 / 1555)
    assert make_gpu_graphs_page.launch_seconds(figures) == pytest.approx(380e-6)
