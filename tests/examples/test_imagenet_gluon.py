"""examples/imagenet_gluon.py from the command line to the checkpoint."""

import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from gluoncv.model_zoo import get_model
from imagenet_common.network import policy_for
from kit.twins import assert_same


def _results(tmp_path):
    return json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_trains(run, tmp_path, dtype):
    assert run(dtype=dtype, num_epochs=3, lr=0.05).status == 0
    results = _results(tmp_path)
    losses = [entry["train_loss"][-1] for entry in results["history"]]
    assert losses[-1] < losses[0]
    assert results["dtype"] == dtype
    assert (results["casts"] > 0) == (dtype != "float32")
    assert results["peak_memory_mb"] > 0
    scale = 2**16 / 2 ** results["skipped_steps"] if dtype == "float16" else 1
    assert results["loss_scale"] == scale


def test_the_policy_is_the_dtype_s_and_on_a_gpu_the_fast_one(run, tmp_path):
    casts = {}
    for policy in ("bfloat16", "bfloat16-safe"):
        assert run(dtype="bfloat16", policy=policy, num_epochs=1, save_frequency=0).status == 0
        casts[policy] = _results(tmp_path)["casts"]
    assert casts["bfloat16"] < casts["bfloat16-safe"]
    chosen = {
        (dtype, ctx.device_type): policy_for(SimpleNamespace(dtype=dtype, policy=None), ctx)
        for dtype in ("float16", "bfloat16")
        for ctx in (mx.cpu(), mx.gpu())
    }
    fast = ("float16", "gpu")
    assert chosen.pop(fast) == "float16-fast"
    assert all(policy == dtype for (dtype, _), policy in chosen.items())


def test_every_validation_sample_counts_once(run, tmp_path):
    assert run(batch_size=16).status == 0
    top1 = _results(tmp_path)["top1"] * 22
    assert top1 == pytest.approx(round(top1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resumed_run_equals_uninterrupted_run(run, tmp_path, dtype):
    common = {"dtype": dtype, "optimizer": "sgd", "save_frequency": 1, "mixup": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(save_dir=whole, **common).status == 0
    stem = f"{whole}/cifar_resnet20_v1-1"
    resume = {"resume_epoch": 1, "resume_params": f"{stem}.params", "resume_states": f"{stem}.states"}
    assert run(save_dir=parts, **common, **resume).status == 0
    assert_same(*(mx.nd.load(f"{folder}/cifar_resnet20_v1-2.params") for folder in (whole, parts)))


def test_checkpoint_loads_without_mxmp(run, tmp_path):
    assert run(dtype="float16", num_epochs=1).status == 0
    net = get_model("cifar_resnet20_v1", classes=10)
    net.load_parameters(str(tmp_path / "params" / "cifar_resnet20_v1-1.params"))
    assert {parameter.dtype for parameter in net.collect_params().values()} <= {np.float32, "float32"}


def test_schedules_smoothing_mixup_and_decay_options(run, tmp_path):
    options = {"label_smoothing": True, "mixup": True, "no_wd": True, "num_epochs": 2}
    for mode in ("poly", "step"):
        assert run(lr_mode=mode, lr_decay_epoch="1", warmup_epochs=1, save_frequency=0, **options).status == 0
        assert np.isfinite(_results(tmp_path)["best_loss"])


def test_logging_file_has_every_interval(run, tmp_path):
    assert run(num_epochs=1, log_interval=2, logging_file=tmp_path / "log" / "train.log").status == 0
    text = (tmp_path / "log" / "train.log").read_text()
    assert [f"step {n}/5" in text for n in (2, 4, 5)] == [True] * 3
