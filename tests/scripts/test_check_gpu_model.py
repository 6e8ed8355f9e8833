"""The check of the acceptance run's file says how far the model is from what was measured."""

from __future__ import annotations

import json

import pytest
from checks import gpu_model

FOUND = {
    "machine": {"device": "Tesla V100-SXM2-16GB", "memory": "16160 MiB"},
    "sizes": {"resnet50": [64, 224], "bert": [4, 32]},
    "networks": {
        "resnet50": {"float32": {"seconds": [0.2, None, 0.3, 0.2]}, "contrib.amp": {"error": "MXNetError: no"}},
        "bert": {"float32": {"seconds": [0.1]}},
    },
    "parts": {"BatchNorm, axis 3, float16": {"seconds": [0.002]}, "unknown": {"seconds": [0.002]}},
}


def checked(found, tmp_path, capsys, *arguments):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    gpu_model.main([str(path), *arguments])
    return capsys.readouterr().out.splitlines()


def test_each_time_stands_beside_the_models(tmp_path, capsys):
    title, _, _, *rows, middle = checked(FOUND, tmp_path, capsys)
    assert title == "Tesla V100-SXM2-16GB, modelled as V100 (SXM2)"
    step, failed, other_size, part, unknown = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert step[:3] == ["resnet50, 64 of 224", "float32", "200"]
    assert float(step[4]) == pytest.approx(float(step[3]) / 200, abs=0.01)
    assert 0.5 < float(step[4]) < 1.5
    assert (failed[2], failed[4]) == ("-", "-")
    assert other_size[3:] == ["-", "-"], "no record is of this size"
    assert float(part[3]) < float(part[2]) == 2
    assert unknown[3:] == ["-", "-"]
    assert middle.startswith("median of 2: ")


@pytest.mark.parametrize(
    ("device", "memory", "gpu"),
    [
        ("Tesla V100-SXM2-32GB", "32510 MiB", "v100"),
        ("Tesla T4", "15360 MiB", "t4"),
        ("NVIDIA A100-SXM4-40GB", "40536 MiB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "81920 MiB", "a100-80"),
    ],
)
def test_the_gpu_is_that_of_the_file(device, memory, gpu):
    assert gpu_model.named(device, memory) == gpu


def test_a_gpu_without_a_model_and_a_file_without_results_are_errors(tmp_path, capsys):
    unknown = {**FOUND, "machine": {"device": "GeForce RTX 3090", "memory": "24268 MiB"}}
    with pytest.raises(SystemExit, match="there is no model of 'GeForce RTX 3090'; --gpu names one of"):
        checked(unknown, tmp_path, capsys)
    assert "modelled as T4" in checked(unknown, tmp_path, capsys, "--gpu", "t4")[0]
    with pytest.raises(SystemExit, match=r"holds no results; bash scripts/gpu_acceptance\.sh writes it"):
        gpu_model.main([str(tmp_path / "none.json")])
