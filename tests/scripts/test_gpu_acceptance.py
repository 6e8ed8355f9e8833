"""The acceptance run on a GPU: it refuses without one, and its report says what failed and how fast it was."""

from __future__ import annotations

import mxnet as mx
import pytest
from checks import gpu_acceptance

STEP = {"seconds": [0.1, 0.1, 0.1], "peak": 3_000_000_000, "before": 1_000_000_000}
FOUND = {
    "machine": {"device": "Tesla V100", "mxmp": "1.0"},
    "gpu tests": {"status": 0, "last": "3 passed", "failed": []},
    "recording": {"status": 0, "last": "48 arrays", "failed": []},
    "emulation": {"status": 1, "last": "1 failed", "failed": ["FAILED tests/x.py::test_y"]},
    "networks": {
        "resnet50": {
            "float32": STEP,
            "contrib.amp": {"error": "MXNetError: no"},
            "float16": {**STEP, "seconds": [0.05, 0.05, 0.05], "peak": 2_000_000_000},
        }
    },
}


def test_it_refuses_without_a_gpu(tmp_path):
    if mx.context.num_gpus():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit, match="MXNet sees no GPU"):
        gpu_acceptance.main(["--output", str(tmp_path / "found.json")])
    assert not list(tmp_path.iterdir())


def test_the_report_has_what_failed_and_ratios_to_fp32():
    text = gpu_acceptance.report(FOUND)
    assert "device: Tesla V100" in text
    assert "gpu tests: ok, 3 passed" in text
    assert "emulation: FAILED, 1 failed\nFAILED tests/x.py::test_y" in text
    assert "| resnet50 | contrib.amp | MXNetError: no | - | - |" in text
    assert "| resnet50 | float16 | 50.0 ms 2.00 (2.00 to 2.00) | 1000 | 0.50 |" in text


def test_the_report_has_the_times_of_parts_and_the_errors_of_others():
    found = {"BatchNorm, axis 3": {"seconds": [0.002, 0.001, 0.002]}, "NHWC": {"error": "not supported"}}
    timed = {"status": 0, "last": "timed", "failed": []}
    text = gpu_acceptance.report({**FOUND, "timing of parts": timed, "parts": found})
    assert "timing of parts: ok, timed" in text
    assert "| BatchNorm, axis 3 | 2.000 |" in text
    assert "| NHWC | not supported |" in text


def test_the_report_stands_where_fp32_failed():
    networks = {"resnet50": {"float32": {"error": "no"}, "float16": STEP}}
    assert "| resnet50 | float16 | 100.0 ms | 2000 | - |" in gpu_acceptance.report({**FOUND, "networks": networks})
