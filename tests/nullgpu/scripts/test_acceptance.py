"""What the acceptance run times asks the null GPU, where its times mean nothing, for what it says."""

from __future__ import annotations

import json
import os

import mxnet as mx
import pytest
from bench import gpu_parts
from checks import gpu_acceptance, gpu_model
from gpu.null.record import recording
from gpu.null.work import work
from support.gpu_model import RECORDS
from support.results import read

PARTS = gpu_parts.parts()


def named(*words: str) -> list[str]:
    return [name for name in PARTS if all(word in name for word in words)]


def calls(name: str) -> list:
    with mx.Context(mx.gpu()):
        call = PARTS[name]()
        with recording() as record:
            call()
            mx.nd.waitall()
    return record.of("call", "launch", "fused")


@pytest.mark.parametrize("name", named("convolution", "512"))
def test_a_part_of_a_convolution_is_its_three_calls_in_its_layout(name):
    found = [event for event in calls(name) if event.is_matrix]
    assert len(found) == 3
    assert {"NHWC" in event.details["x"] for event in found} == {"NHWC" in name}
    assert {event.dtypes == {"f16"} for event in found} == {"float16" in name}


@pytest.mark.parametrize("dtype", gpu_parts.DTYPES)
def test_a_norm_over_axis_3_has_the_descriptor_of_its_pixels(dtype):
    shapes = {}
    for name in named("BatchNorm", dtype):
        forward, backward = (event for event in calls(name) if "BatchNormalization" in event.name)
        assert forward.details["x"] == backward.details["x"]
        shapes[name.split(",")[1].strip()] = forward.details["x"].split("[")[1]
    assert shapes["axis 3"].startswith(f"{gpu_parts.BATCH * 28 * 28},256,1,1]")
    assert shapes["axis 1"].startswith("64,256,28,28]")


@pytest.mark.parametrize("dtype", gpu_parts.DTYPES)
def test_a_fused_chain_is_fewer_kernels_than_one_that_is_not(dtype):
    (fused,), (apart,) = named("operators, fused", dtype), named("operators, not fused", dtype)
    kernels = [event for event in calls(fused) if event.kind == "fused"]
    assert 1 <= len(kernels) < len(calls(apart))
    assert not [event for event in calls(apart) if event.kind == "fused"]


@pytest.mark.parametrize("name", [*named("BatchNorm", "float16"), *named("convolution", "groups", "float16")])
def test_the_models_records_are_of_the_parts_as_they_are(name):
    assert work(calls(name)) == read(RECORDS)[f"part: {name}"]["call"]


PHOTOGRAPHS = """
from types import SimpleNamespace
import numpy
def load_sample_images():
    return SimpleNamespace(images=[numpy.zeros((427, 640, 3), "uint8")])
"""


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """In place of scikit-learn's, which the null GPU's environment lacks: nothing is computed of them."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "datasets.py").write_text(PHOTOGRAPHS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.usefixtures("photographs")
def test_the_run_writes_one_file_that_is_held_against_the_model(tmp_path, monkeypatch, capsys):
    """Without its tests and its recording, which need what a GPU computes."""
    skipped = {"status": 1, "last": "not on the null GPU", "failed": []}
    monkeypatch.setattr(gpu_acceptance, "tests", lambda *arguments, **environment: skipped)
    run = gpu_acceptance.called
    monkeypatch.setattr(
        gpu_acceptance, "called", lambda command, env: run(command, env) if "gpu-parts" in command else skipped
    )
    monkeypatch.setattr(gpu_acceptance, "VARIANTS", ["float32", "float16"])
    monkeypatch.setattr(gpu_acceptance, "machine", lambda: {"device": "Tesla V100-SXM2-16GB", "memory": "16160 MiB"})
    path = tmp_path / "found.json"
    assert gpu_acceptance.main(["--quick", "--output", str(path)]) == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["timing of parts"]["status"] == 0, found["timing of parts"]
    assert found["parts"].keys() == PARTS.keys()
    assert all(len(each["seconds"]) == 3 for each in found["parts"].values())
    assert all("seconds" in each for each in found["networks"]["resnet50"].values()), found["networks"]
    capsys.readouterr()
    gpu_model.main([str(path)])
    text = capsys.readouterr().out
    assert "modelled as V100 (SXM2)" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| convolution", "| BatchNorm", "| 4"))]
    assert len(rows) == len(PARTS)
    assert all(float(cell.strip(" |")) > 0 for row in rows for cell in row[2:])
