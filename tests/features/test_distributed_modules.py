import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.twins import assert_same

from mxmp.launch import launch, launch_horovod

pytestmark = pytest.mark.slow

WORKER = str(Path(__file__).with_name("module_worker.py"))
HOROVOD = pytest.param(
    "horovod",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: bash scripts/check_horovod.sh"
    ),
)


def run(store, params, out):
    start = launch_horovod if store == "horovod" else launch
    assert start([sys.executable, "-W", "ignore", WORKER, store, params, out], workers=2, timeout=120) == 0
    return [np.load(f"{out}-{rank}.npz") for rank in (0, 1)]


@pytest.mark.parametrize("store", ["dist_sync", HOROVOD])
@pytest.mark.parametrize("params", ["float32", "float16"])
def test_two_workers_start_equal_stay_equal_and_skip_together(tmp_path, params, store):
    first, second = run(store, params, str(tmp_path / "worker"))
    assert_same(first["weights"], second["weights"])
    assert first["skipped"].tolist() == second["skipped"].tolist() == [False, False, True, False]
    assert first["scale"] == second["scale"] == 32.0
    weights = first["weights"]
    np.testing.assert_array_equal(weights[2], weights[3])
    assert not np.array_equal(weights[3], weights[4])


@pytest.mark.parametrize("params", ["float32", "float16"])
@pytest.mark.parametrize("store", [HOROVOD])
def test_horovod_trains_what_dist_sync_trains(tmp_path, params, store):
    """An average over workers of one worker's batch, and a sum over the batch of all: the same."""
    ours, theirs = (run(name, params, str(tmp_path / name))[0]["weights"] for name in (store, "dist_sync"))
    np.testing.assert_array_equal(ours, theirs)
