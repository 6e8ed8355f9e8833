import sys
from pathlib import Path

import numpy as np
import pytest
from launch_local import launch

WORKER = str(Path(__file__).with_name("module_worker.py"))


@pytest.mark.parametrize("params", ["float32", "float16"])
def test_two_workers_start_equal_stay_equal_and_skip_together(tmp_path, params):
    out = str(tmp_path / "worker")
    assert launch([sys.executable, WORKER, params, out], workers=2, timeout=120) == 0
    first, second = (np.load(f"{out}-{rank}.npz") for rank in (0, 1))
    for left, right in zip(first["weights"], second["weights"]):
        np.testing.assert_array_equal(left, right)
    assert first["skipped"].tolist() == second["skipped"].tolist() == [False, False, True, False]
    assert first["scale"] == second["scale"] == 32.0
    weights = first["weights"]
    np.testing.assert_array_equal(weights[2], weights[3])
    assert not np.array_equal(weights[3], weights[4])
