"""MXNet's distributed KVStore on this machine: all workers take the same decision, and none hangs."""

from __future__ import annotations

import importlib.util
import math
import pickle
import re
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit.nets import two_layers

import mxmp
from mxmp import launch as launcher

from . import dist_worker

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod: bash scripts/check_horovod.sh"
)


def job(monkeypatch, store, *args, timeout=120):
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parent}:{Path(mxmp.__file__).parents[1]}")
    command = [sys.executable, "-W", "ignore", str(HERE / "dist_worker.py"), store, *map(str, args)]
    launch = launcher.launch_horovod if store == "horovod" else launcher.launch
    return launch(command, workers=2, timeout=timeout)


@pytest.fixture(
    scope="module",
    params=[
        ("dist_sync", 1),
        pytest.param(("horovod", 1), marks=needs_horovod),
        pytest.param(("horovod", 2), marks=needs_horovod),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def workers(request, tmp_path_factory):
    """What two workers saw, step by step, and how many devices each has."""
    store, devices = request.param
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        assert job(patch, store, folder, "--devices", devices) == 0
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)], devices


def test_workers_that_start_apart_are_equal_after_the_first_step_and_stay_so(workers):
    (first, second), devices = workers
    for step in first:
        assert [[w[0] for w in each] for each in step["weights"]] == [["float16"] * devices, ["float32"] * devices]
        assert all(w == each[0] for each in step["weights"] for w in each)
    for step in range(dist_worker.STEPS):
        for what in ("weights", "masters", "scale", "norm"):
            assert first[step][what] == second[step][what] or (what == "norm" and math.isnan(first[step][what]))


def test_an_overflow_on_one_worker_makes_all_skip_name_it_and_back_off(workers):
    for seen in workers[0]:
        assert [step["skipped"] for step in seen] == [i in dist_worker.SPOILED for i in range(dist_worker.STEPS)]
        expected = [f"net_dense{param}_weight" for _, param in dist_worker.SPOILED.values()]
        assert [sorted(set(step["names"])) for step in seen if step["skipped"]] == [[name] for name in expected]
        assert [step["scale"] for step in seen] == [2.0**k for k in (7, 7, 8, 7, 7, 6, 6, 7)]
        for step in (3, 5):
            assert seen[step]["masters"] == seen[step - 1]["masters"]
            assert seen[step]["weights"] == seen[step - 1]["weights"]


def test_two_workers_train_what_one_process_with_all_devices_trains(workers):
    found, devices = workers
    expected = dist_worker.run("local", [0, 1], devices, 50, 8 * devices)
    for seen in found:
        for step, reference in zip(seen, expected):
            if devices == 1:
                assert step["masters"] == reference["masters"]
            else:  # four float16 gradients, summed in another order
                for (_, _, ours), (_, _, theirs) in zip(step["masters"], reference["masters"]):
                    np.testing.assert_allclose(np.frombuffer(ours, "f4"), np.frombuffer(theirs, "f4"), atol=1e-4)


@pytest.mark.parametrize(
    ("store", "code"), [("dist_sync", 3), pytest.param("horovod", 1, marks=needs_horovod)], ids=["dist_sync", "horovod"]
)
def test_a_worker_that_dies_ends_the_job_with_its_code_instead_of_a_hang(monkeypatch, tmp_path, capfd, store, code):
    start = time.monotonic()
    assert job(monkeypatch, store, tmp_path, "--dies", 1, timeout=100) == code
    assert time.monotonic() - start < 60
    assert re.search(f"worker of .* ended with code {code}; the job ends", capfd.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_job_that_hangs_is_ended_at_its_time_limit(capfd):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert launcher.launch(command, workers=2, timeout=1) == 124
    assert time.monotonic() - start < 15
    assert "past its time limit" in capfd.readouterr().err


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
