"""The model of a GPU step's time is the sum it says it is, and what the page has of it follows from the records."""

from __future__ import annotations

import json

import pytest
from support import gpu_model as model
from support.results import FOLDER, read
from sweep import gpu_times as sweep

V100, A100 = model.MODELLED["v100"], model.MODELLED["a100"]
ALL = model.Reached(bandwidth=1.0)


def test_each_launch_takes_the_longer_of_computing_and_moving_and_a_latency():
    computed, moved = ["float16", 125 * 10**9, 900, 1], ["float16", 125, 900 * 10**6, 3]
    assert model.seconds([computed], V100, ALL) == pytest.approx(0.001 + 5e-6)
    assert model.seconds([moved], V100, ALL) == pytest.approx(3 * (0.001 + 5e-6))
    assert model.seconds([computed, moved], V100, ALL) == pytest.approx(0.004 + 20e-6)


def test_fp32_computes_in_tf32_only_in_cudnn_and_on_an_a100():
    flops = 156 * 10**9
    seconds = {
        (kind, gpu.name): model.seconds([[kind, flops, 0, 1]], gpu, ALL)
        for kind in ("tf32", "float32")
        for gpu in (V100, A100)
    }
    at_tf32, *others = sorted(seconds.values())
    assert seconds["tf32", A100.name] == at_tf32 == pytest.approx(0.001 + 5e-6)
    assert seconds["float32", A100.name] == pytest.approx(0.008 + 5e-6)
    assert seconds["tf32", V100.name] == seconds["float32", V100.name] == max(others)


def test_a_share_of_a_peak_is_only_of_what_it_bounds():
    half = model.Reached(bandwidth=1.0, float32=0.5, tensor=0.25)
    work = {"float16": 125 * 10**9, "float32": 15_700 * 10**6}
    for kind, share in (("float16", 4), ("float32", 2)):
        assert model.seconds([[kind, work[kind], 0, 1]], V100, half) == pytest.approx(0.001 * share + 5e-6)
    slow = model.Reached(bandwidth=0.5)
    assert model.seconds([["memory", 0, 900 * 10**6, 1]], V100, slow) == pytest.approx(0.002 + 5e-6)


def test_channels_last_has_no_transposes():
    work = [["float16", 1, 900, 1], ["layout", 0, 900 * 10**6, 1]]
    assert model.seconds(work, V100, ALL) > 0.001
    assert model.seconds(work, V100, ALL, channels_last=True) < 0.0001


def test_the_fitted_figures_are_met_and_no_other_is_fitted():
    records = read(model.RECORDS)
    reached = model.fit(records)
    for published in model.FITTED.values():
        assert model.modelled(published, records, reached) * published.rate == pytest.approx(published.batch, rel=1e-3)
    assert len(model.FITTED) == 2
    assert 0.3 < reached.tensor < reached.float32 < 1


def test_the_models_file_is_made_of_the_records():
    """Made again, it is what the page shows."""
    kept = json.loads((FOLDER / "gpu-model.json").read_text(encoding="utf-8"))
    assert model.summary(read(model.RECORDS)) == kept


def test_every_record_that_the_page_needs_is_there():
    records = read(model.RECORDS)
    for name, variants in sweep.wanted().items():
        assert records[name].keys() >= set(variants), name


def test_a_sweep_records_only_what_is_lacking(tmp_path, monkeypatch):
    asked = []

    def process(seconds, worker, name, variant):
        asked.append((name, variant))
        return ({"work": [["memory", 0, 8, 1]]}, "") if variant == "float32" else ({}, "the process ended by SIGKILL")

    for setting in ("MXNET_ENGINE_TYPE", "NG_GIB"):  # which the sweep sets for its processes
        monkeypatch.setenv(setting, "")
    monkeypatch.setattr(sweep, "in_a_process", process)
    monkeypatch.setattr(sweep, "prepare_processes", lambda *modules: None)
    path = tmp_path / "times.json"
    name = "timed: resnet50"
    sweep.main([name, "--results", str(path)])
    assert asked == [(name, variant) for variant in sweep.wanted()[name]]
    assert read(path)[name]["float32"] == [["memory", 0, 8, 1]]
    assert read(path)[name]["float16"] == {"error": "the process ended by SIGKILL"}
    sweep.main([name, "--results", str(path)])
    assert len(asked) == len(sweep.wanted()[name])
