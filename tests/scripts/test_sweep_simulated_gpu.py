"""The sweep that trains on the simulated GPU goes on after the last epoch of an ended process."""

from __future__ import annotations

import json

import pytest
from support.results import read
from sweep import simulated_gpu


def epoch(number):
    figures = {"seconds": 1.0, "train_loss": [2.0], "loss": 1.0, "top1": 0.5, "loss_scale": 2048.0}
    return {"epoch": number, "skipped_steps": number, **figures}


def left(work, *numbers):
    work.mkdir(exist_ok=True)
    (work / "results.json").write_text(json.dumps({"history": [epoch(number) for number in numbers]}))


def test_epochs_of_two_processes_are_joined_and_none_counts_twice(tmp_path):
    path, name = tmp_path / "results", "GPU float16"
    for numbers in ((1, 2), (1, 2), (3, 4)):
        left(tmp_path / "work", *numbers)
        simulated_gpu.merge(path, name, tmp_path / "work")
    assert [each["skipped_steps"] for each in read(path)[name]] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", simulated_gpu.RUNS)
def test_the_command_goes_on_from_the_last_whole_epoch_until_all_are_done(tmp_path, name):
    words = " ".join(simulated_gpu.todo(name, tmp_path, tmp_path, 3))
    assert f"--resume-params {tmp_path}/cifar_resnet20_v1-3.params" in words
    assert ("simgpu.sh" in words) == name.startswith("GPU")
    assert "--resume" not in " ".join(simulated_gpu.todo(name, tmp_path, tmp_path, 0))
    assert simulated_gpu.todo(name, tmp_path, tmp_path, 10) == []
