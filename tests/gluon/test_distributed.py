"""MXNet's distributed KVStore on this machine: all workers take the same decision, and none hangs."""

from __future__ import annotations

import math
import pickle
import sys
import time
from pathlib import Path

import dist_worker
import launch_local
import mxnet as mx
import pytest
from tiny import two_layers

import mxmp

HERE = Path(__file__).parent


def job(monkeypatch, *args, timeout=120):
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parent}:{Path(mxmp.__file__).parents[1]}")
    command = [sys.executable, "-W", "ignore", str(HERE / "dist_worker.py"), *map(str, args)]
    return launch_local.launch(command, workers=2, timeout=timeout)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What two workers saw, step by step."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        assert job(patch, folder) == 0
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


def test_workers_that_start_apart_are_equal_after_the_first_step_and_stay_so(workers):
    first, second = workers
    assert [tuple(w[0] for w in step["weights"]) for step in first] == [("float16", "float32")] * dist_worker.STEPS
    for step in range(dist_worker.STEPS):
        for what in ("weights", "masters", "scale", "norm"):
            assert first[step][what] == second[step][what] or (what == "norm" and math.isnan(first[step][what]))


def test_an_overflow_on_one_worker_makes_all_skip_name_it_and_back_off(workers):
    for seen in workers:
        assert [step["skipped"] for step in seen] == [i in dist_worker.SPOILED for i in range(dist_worker.STEPS)]
        expected = [[f"net_dense{param}_weight"] for _, param in dist_worker.SPOILED.values()]
        assert [step["names"] for step in seen if step["skipped"]] == expected
        assert [step["scale"] for step in seen] == [2.0**k for k in (7, 7, 8, 7, 7, 6, 6, 7)]
        for step in (3, 5):
            assert seen[step]["masters"] == seen[step - 1]["masters"]
            assert seen[step]["weights"] == seen[step - 1]["weights"]


def test_two_workers_train_what_one_process_with_two_devices_trains(workers):
    expected = dist_worker.run("local", None, 2, seed=50)
    for seen in workers:
        assert [step["masters"] for step in seen] == [step["masters"] for step in expected]


def test_a_worker_that_dies_ends_the_job_with_its_code_instead_of_a_hang(monkeypatch, tmp_path, capfd):
    start = time.monotonic()
    assert job(monkeypatch, tmp_path, 1, timeout=100) == 3
    assert time.monotonic() - start < 60
    assert "a worker ended with code 3" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_job_that_hangs_is_ended_at_its_time_limit(capfd):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert launch_local.launch(command, workers=2, timeout=1) == 124
    assert time.monotonic() - start < 15
    assert "past its time limit" in capfd.readouterr().err


def test_a_worker_killed_by_a_signal_is_an_error_too():
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert launch_local.launch(command, workers=1, timeout=30) == 137


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"kvstore": "dist_async"}, "dist_async.*before any check.*dist_sync"),
        ({"kvstore": "dist_sync", "update_on_kvstore": True}, "before they are checked"),
        ({"kvstore": "dist_sync", "compression_params": {"type": "2bit", "threshold": 0.5}}, "threshold"),
    ],
)
def test_what_cannot_be_checked_before_it_is_applied_is_refused_at_once(kwargs, reason):
    with pytest.raises(ValueError, match=reason):
        mxmp.Trainer(two_layers().collect_params(), "sgd", **kwargs)


def test_a_kvstore_object_is_asked_for_its_kind():
    class Store(mx.kv.KVStoreBase):
        type = "dist_device_async"

    with pytest.raises(ValueError, match=r"dist_device_async.*dist_sync"):
        mxmp.Trainer(two_layers().collect_params(), "sgd", kvstore=Store())
