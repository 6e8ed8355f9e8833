"""The sweep of GPU records goes on where it ended, and its page and picture say what the records hold."""

from __future__ import annotations

import json

import pytest
from pages import gpu_graphs as page
from support import gpu_model
from support.results import tree
from sweep import gpu_graphs as sweep

pytest.importorskip("gluoncv", reason="needs GluonCV: pip install 'mxmp[vision]'")
pytest.importorskip("gluonnlp", reason="needs GluonNLP: pip install 'mxmp[nlp]'")

from support.zoo import catalogue

FP32 = {
    "peak_bytes": 2_000_000_000,
    "launches": 50,
    "step_launches": 40,
    "matrix_calls": {"f32, sums f32, DEFAULT": 4},
    "library_calls": 10,
    "casts": 0,
    "bytes_cast": 0,
    "fused_casts": 0,
    "seconds": {"v100": 0.01, "a100": 0.004},
}
LOW = {
    **FP32,
    "peak_bytes": 1_000_000_000,
    "launches": 60,
    "matrix_calls": {"f16, sums f32, TENSOR_OP": 3, "f32, sums f32, DEFAULT": 1},
    "bytes_cast": 900_000_000,
    "seconds": {"v100": 0.005, "a100": 0.003},
}
AMP = {**LOW, "peak_bytes": 1_500_000_000, "step_launches": 60, "bytes_cast": 100}
AMP["seconds"] = {"v100": 0.008, "a100": 0.003}


def network(**variants):
    return {"kind": "classification", "batch": "large", "inputs": [[128, 3, 32, 32]], "variants": variants}


ALL = network(float32=FP32, **{"contrib.amp": AMP}, **dict.fromkeys(sweep.VARIANTS[2:], LOW))


A_FIGURE = {"title": "A", "batch": 64, "gpu": "V100", "published": 500.0, "source": "NVIDIA", "channels_last": False}
MODEL = {
    "reached": {"bandwidth": 0.8, "float32": 0.9, "tensor": 0.4},
    "bound": 0.05,
    "median by latency": {"0 µs": 0.93, "10 µs": 0.96},
    "published": [
        {**A_FIGURE, "variant": "float32", "modelled": 500.0, "of published": 1.0, "fitted": True},
        {**A_FIGURE, "variant": "float16-fast", "modelled": 400.0, "of published": 1.25, "fitted": False},
    ],
}


def test_a_sweep_records_only_what_is_lacking():
    requested = []

    def run(target, name, variant, batch):
        requested.append((variant, batch))
        if batch != "small":
            return {"network": {"kind": "classification"}, "error": "too large"}, ""
        return {"network": {"kind": "classification", "batch": "small", "inputs": []}, "figures": FP32}, ""

    found = sweep.record("some", {}, run, None)
    tried = [("float32", batch) for batch in ("large", "medium", "small")]
    assert requested == [*tried, *((variant, "small") for variant in sweep.VARIANTS[1:])]
    assert list(found["variants"]) == sweep.VARIANTS
    requested.clear()
    kept = {**found, "variants": {"float32": FP32, "float16": LOW}}
    again = sweep.record("some", kept, run, None)
    assert [variant for variant, _ in requested] == ["contrib.amp", "float16-fast", sweep.SAFE_SUMS]
    assert again["variants"]["float16"] == LOW


def test_what_an_older_tree_asked_for_is_recorded_anew():
    asked = []

    def run(target, name, variant, batch):
        asked.append(variant)
        return {"figures": LOW}, ""

    old = {**ALL, "mxmp": "an older tree"}
    found = sweep.record("some", old, run, "mxmp")
    assert asked == sweep.OURS
    assert found["mxmp"] == tree()
    assert sweep.lacking(found, "mxmp") == []
    without_amp = network(float32=FP32, **dict.fromkeys(sweep.OURS, LOW))
    assert "mxmp" not in sweep.record("some", without_amp, run, None), "its float16 is of an older tree"


def test_a_network_that_fp32_cannot_train_is_a_result_and_so_is_a_variant_that_fails():
    def run(target, name, variant, batch):
        return ({"error": "no"}, "") if variant in failing else ({"network": {"batch": "large"}, "figures": FP32}, "")

    failing = {"float32"}
    assert sweep.record("some", {}, run, None) == {"error": "no"}
    assert sweep.lacking({"error": "no"}, None) == []
    assert sweep.lacking({"error": "no"}, "failed") == sweep.VARIANTS
    failing = {"contrib.amp"}
    found = sweep.record("some", {}, run, None)
    assert found["variants"]["contrib.amp"] == {"error": "no"}
    assert sweep.lacking(found, None) == []
    assert sweep.lacking(found, "failed") == ["contrib.amp"]


def test_inputs_are_repeated_to_a_batch_as_one_trains_with():
    case = catalogue.CASES["cifar_resnet20_v1"]()
    (small,), (large,) = case.inputs(), sweep.enlarged(case).inputs()
    assert large.shape == (128, 3, 32, 32)
    assert (large[2:4] == small).asnumpy().all()
    bert = sweep.enlarged(catalogue.CASES["bert_12_768_12"]())
    assert [x.shape for x in bert.inputs()] == [(24, 128), (24, 128), (24,), (24, 20)]


def test_a_name_that_no_network_has_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"no network is called 'nn\.Dense'"):
        sweep.main(["nn.Dense", "--results", str(tmp_path / "graphs.json")])


def test_the_page_counts_networks_and_says_what_failed():
    results = {"resnet50_v1b": ALL, "alexnet": {"error": "kept"}, "vgg11": {"left_out": "a reason"}}
    text = page.page(results, MODEL)
    assert "## 1 networks" in text
    assert "| `alexnet` |  | kept |" in text
    assert "| `vgg11` |  | a reason |" in text
    assert "| peak memory, of FP32's | 1.00 | 0.75 | 0.50 | 0.50 |" in text
    assert "| no more bytes cast than `mxnet.contrib.amp` |  | 1 of 1 | 0 of 1 | 0 of 1 |" in text
    assert "| at most 1.1 of FP32's launches and 12 |  | 1 of 1 | 1 of 1 | 1 of 1 |" in text
    assert "| at most 15 launches in the step more than FP32 |  | 0 of 1 | 1 of 1 | 1 of 1 |" in text
    assert "|  | mxmp, `float16` | 5 | 3 | 1 | 60 | 40 | 0.9 | 10 | 75 % | 0 |" in text
    assert "| V100 | FP32's time over the variant's: median, range | 1.25 (1.25 to 1.25) | 2.00 (2.00 to 2.00)" in text
    assert "|  | faster than `mxnet.contrib.amp` |  | 0 of 1 | 0 of 1 | 0 of 1 |" in text
    assert "| `resnet50_v1b` | 128 x 3 x 32 x 32 | 10 / 8 / 5 / 5 / 5 | 4 / 3 / 3 / 3 / 3 | 2 / 1.5 / 1 / 1" in text
    assert "Of 1 figures that nothing was fitted on, 0 are within 15 %" in text
    assert "| A | 64 | V100 | mixed | 500 | 400 | 1.25 | [NVIDIA] |" in text
    assert "| A | 64 | V100 | FP32 | 500 | 500 | 1.00, fitted | [NVIDIA] |" in text


@pytest.mark.parametrize("draw", [page.picture, page.picture_of_times])
def test_a_picture_is_drawn(draw, tmp_path):
    picture = tmp_path / "graphs.png"
    draw({"resnet50_v1b": ALL}, picture)
    assert picture.stat().st_size > 10_000


def test_a_network_at_the_batch_of_a_published_figure_has_the_seconds_of_its_record():
    """Both sweeps recorded the same, and the model was fitted on what is here now."""
    networks, records = (json.loads(p.read_text(encoding="utf-8")) for p in (sweep.RESULTS, gpu_model.RECORDS))
    reached, found = gpu_model.fit(records), 0
    for name in [each for each in records if each.endswith(", 128") and each[:-5] in networks]:
        if networks[name[:-5]]["batch"] == "large":
            for variant, work in records[name].items():
                seconds = networks[name[:-5]]["variants"][variant]["seconds"]
                assert seconds == pytest.approx(gpu_model.times(work, reached), rel=1e-3)
                found += 1
    assert found > 2
