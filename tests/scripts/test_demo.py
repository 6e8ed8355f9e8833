"""The demo, for one epoch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kit.processes import ROOT

from mxmp.host import cpu


@pytest.mark.slow
def test_one_epoch_of_each_run_ends_with_its_results_and_a_picture(tmp_path):
    command = [sys.executable, "scripts/dev.py", "demo", "--folder", str(tmp_path), "--epochs", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "curves.png").exists()
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    usual = {"float32", "float16", "float16-symbolic"} | ({"bfloat16"} if cpu.multiplies_bfloat16() else set())
    assert results.keys() == usual
    assert all(result["top1"] > 0.2 for result in results.values())
