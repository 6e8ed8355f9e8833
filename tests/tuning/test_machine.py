"""Times are of the machine that they were measured on: GPUs of two models keep times of their own."""

from __future__ import annotations

import mxnet as mx
import pytest

from mxmp.tuning import machine

pytestmark = pytest.mark.usefixtures("in_this_process")


class Driver:
    """CUDA's driver library on a machine with GPUs of these models."""

    def __init__(self, *models):
        self.models = models

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuDeviceGet(self, device, number):  # noqa: N802
        device._obj.value = number
        return 0 if number < len(self.models) else 101

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = self.models[device.value].encode()[: size - 1]
        return 0


def test_gpus_of_two_models_keep_times_of_their_own(tmp_path, monkeypatch):
    files = {}
    for model in ("NVIDIA T4", "NVIDIA V100"):
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda name, model=model: Driver(model, "NVIDIA A100"))
        found = [machine.describe(mx.gpu(0)), machine.describe(mx.gpu(1))]
        assert [each["gpu"] for each in found] == [model, "NVIDIA A100"]
        files[model] = [machine.cache_file(each, tmp_path) for each in found]
    assert len({each for pair in files.values() for each in pair}) == 3


def test_a_machine_without_cuda_names_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    assert machine.describe(mx.gpu(0))["gpu"] == ""
    assert machine.describe(mx.cpu())["gpu"] is None
