"""The benchmark of models: processes that take turns, figures that add up, and the page that is made of them."""

from __future__ import annotations

import json
import sys

import pytest
from bench import models as bench_models
from bench import turns
from bench.networks import NETWORKS, network
from pages import benchmarks as make_benchmarks_page

pytest.importorskip("gluoncv", reason="needs GluonCV: pip install 'mxmp[vision]'")


@pytest.mark.slow
def test_two_variants_take_turns_and_a_second_run_measures_nothing_again(tmp_path, capsys):
    path = tmp_path / "benchmarks.json"
    small = ["cifar_resnet20_v1", "--batch", "2", "--size", "32", "--threads", "1", "--rounds", "2", "--warmup", "1"]
    command = [*small, "--tasks", "training", "--variants", "float32", "rules", "--results", str(path)]
    bench_models.main(command)
    assert capsys.readouterr().out.startswith("cifar_resnet20_v1, training: float32 ")
    result = json.loads(path.read_text())["cifar_resnet20_v1, training"]
    assert (result["batch"], result["size"], list(result["variants"])) == (2, 32, ["float32", "rules"])
    for figures in result["variants"].values():
        assert len(figures["seconds"]) == 2
        assert all(0 < seconds < 60 for seconds in figures["seconds"])
        assert figures["peak"] > figures["before"] > 2**26
        assert figures["operators"]["Convolution"][0] == figures["operators"]["_backward_Convolution"][0] == 21
    assert "amp_cast" in result["variants"]["rules"]["operators"]
    assert "amp_cast" not in result["variants"]["float32"]["operators"]
    bench_models.main(command)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_what_a_variant_cannot_do_is_its_result(tmp_path, capsys):
    path = tmp_path / "benchmarks.json"
    bench_models.main(["no_such_network", "--variants", "float32", "--tasks", "training", "--results", str(path)])
    found = json.loads(path.read_text())["no_such_network, training"]["variants"]["float32"]
    assert found["error"].startswith("ValueError: ")
    assert "ValueError" in capsys.readouterr().out


def test_the_networks_of_the_benchmark():
    assert len(NETWORKS) == 12
    assert network("resnet18_v1").title == "resnet18_v1"


# -- Turns ------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from bench.turns import serve

def run(config):
    print("noise on stdout is no answer")
    log = open(config["log"], "a")
    yield {"prepared": 0}
    for number, command in enumerate(sys.stdin):
        log.write(config["name"])
        log.flush()
        if config["name"] == "b" and number == 2:
            sys.exit(3)
        yield {"seconds": 1.0 + number, "skipped": config["name"] == "c" and number == 1}

serve(run)
"""


def test_turns_alternate_and_a_worker_that_ends_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    script, log = tmp_path / "worker.py", tmp_path / "log"
    script.write_text(SCRIPT)
    workers = {name: turns.Worker(script, {"name": name, "log": str(log)}, threads=1, seconds=30) for name in "abc"}
    times, failed = turns.take_turns(workers, 1, 3)
    for worker in workers.values():
        worker.stop()
    assert log.read_text() == "abccbaabcca"
    assert times == {"a": [2.0, 3.0, 4.0], "c": [None, 3.0, 4.0]}
    assert failed == {"b": "the process ended with 3"}


# -- The page ---------------------------------------------------------------------------------------


def variant(seconds, peak, **operators):
    return {"seconds": seconds, "peak": peak, "before": 1, "operators": {n: [1, ms] for n, ms in operators.items()}}


TUNING = {"seconds": 60.0, "operators": 12, "chosen": "least time", "predicted": 4.4, "measured": 4.0}
RESULT = {
    "title": "Net",
    "task": "training",
    "dtype": "bfloat16",
    "batch": 8,
    "size": 112,
    "cpu": "a CPU",
    "threads": 1,
    "variants": {
        "float32": variant([2.0, 4.0, 6.0], 2**30, Convolution=30, _backward_Convolution=50, relu=20),
        "rules": variant([1.0, None, 2.0], 2**29, Convolution=15, _backward_Convolution=25, relu=30, amp_cast=5),
        "tuned": {**variant([1.0, 1.0, 1.0], 2**29, Convolution=15), "tuning": TUNING},
        "contrib.amp": {"error": "MXNetError: no"},
    },
}


def test_figures_are_those_by_hand():
    assert make_benchmarks_page.ratios(RESULT, "rules") == [2.0, 3.0]  # a skipped step is no step
    found = make_benchmarks_page.bounds(RESULT)
    assert found == pytest.approx({"share": 0.8, "rate": 2.0, "amdahl": 1 / 0.6, "best": 100 / 60})
    assert make_benchmarks_page.bounds({"variants": {"float32": RESULT["variants"]["float32"]}}) is None


def test_the_page_shows_them(tmp_path):
    emulated = {**RESULT, "title": "Other", "dtype": "float16"}
    parallel = {**RESULT, "title": "Parallel", "threads": 2}
    results = {"net, training": RESULT, "net, training, 2 threads": parallel, "other, training, float16": emulated}
    text = make_benchmarks_page.page(results)
    assert "| **Net**, 8 of 112 | 4000.0 | 2.50 (1.75 to 3.25) | 4.00 (2.00 to 6.00) | - |" in text
    assert "| **Net**, 8 of 112 | training | 12 | 60 | least time | 4.40 | 4.00 | 4.00 (2.00 to 6.00) |" in text
    assert "differ by 10 % in the median" in text
    assert "| **Other**, 8 of 112 | training | 4000.0 | 0.42 (0.29 to 0.54) |" in text
    assert text.count("Other") == 1
    own = text.split("## Training with two threads")[1].split("\n## ")[0]
    assert "| **Parallel**, 8 of 112 | 4000.0 | 2.50 (1.75 to 3.25) | 4.00 (2.00 to 6.00) | - |" in own
    assert text.count("Parallel") == 1
    assert "| **Net**, 8 of 112 | training | 1024 | 0.50 | 0.50 | - |" in text
    assert "| **Net**, 8 of 112 | 80 % | 2.00 | 1.67 | 1.67 | 2.50 | 4.00 | 240 % |" in text
    assert "| Net | training | contrib.amp | MXNetError: no |" in text
    make_benchmarks_page.picture({"net, training": RESULT}, tmp_path / "benchmarks.png")
    assert (tmp_path / "benchmarks.png").stat().st_size > 5_000
