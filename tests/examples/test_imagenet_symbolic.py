"""examples/imagenet_symbolic.py from the command line to the checkpoint."""

import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.__main__ import main as tune

MODEL = "cifar_resnet20_v1"


@pytest.fixture
def run(arguments, capsys):
    import imagenet_symbolic

    def call(**changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MXNET_SUBGRAPH_BACKEND", "")  # noted, to be as it was afterwards
            patch.delenv("MXNET_SUBGRAPH_BACKEND")
            status = imagenet_symbolic.main(arguments(**changes))
        return SimpleNamespace(status=status, error=capsys.readouterr().err.strip().splitlines()[-1])

    return call


def _results(tmp_path):
    return json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_trains(run, tmp_path, dtype):
    assert run(dtype=dtype, num_epochs=3, lr=0.05).status == 0
    results = _results(tmp_path)
    losses = [entry["train_loss"][-1] for entry in results["history"]]
    assert losses[-1] < losses[0]
    assert (results["casts"] > 0) == (dtype != "float32")
    top1 = results["top1"] * 22
    assert top1 == pytest.approx(round(top1)), "every validation sample counts once"


def test_trains_by_a_plan_of_its_checkpoint(run, tmp_path):
    assert run(num_epochs=1).status == 0
    (symbol,) = (tmp_path / "params").glob("*symbol.json")
    plan = str(tmp_path / "plan.json")
    assert (
        tune(["tune", str(symbol), "--shape", "data=8,3,16,16", "--bytes", "--exclude", "*dense*", "--out", plan]) == 0
    )
    casts = len(mxmp.explain(mx.sym.load(str(symbol)), policy=mxmp.Plan.load(plan)).graphs[0].casts)
    assert run(num_epochs=1, dtype="bfloat16", policy=plan).status == 0
    assert _results(tmp_path)["casts"] == casts
    assert run(num_epochs=1, dtype="bfloat16").status == 0
    assert _results(tmp_path)["casts"] > casts


# A plain mx.mod.Module leaves the states file open.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resumed_run_equals_uninterrupted_run(run, tmp_path, dtype):
    common = {"dtype": dtype, "optimizer": "sgd", "save_frequency": 1, "mixup": True, "label_smoothing": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(save_dir=whole, **common).status == 0
    stem = f"{whole}/{MODEL}-0001"
    resume = {"resume_epoch": 1, "resume_params": f"{stem}.params", "resume_states": f"{stem}.states"}
    assert run(save_dir=parts, **common, **resume).status == 0
    expected, got = (mx.nd.load(f"{folder}/{MODEL}-0002.params") for folder in (whole, parts))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        if dtype == "float32" and "running" in name:
            continue  # plain MXNet reads them at the end of an epoch while BatchNorm's last backward may yet write
        np.testing.assert_array_equal(value.asnumpy(), got[name].asnumpy(), err_msg=name)


def test_checkpoint_loads_without_mxmp_and_scores_as_printed(run, tmp_path):
    assert run(dtype="float16", num_epochs=2, no_wd=True).status == 0
    symbol, args, auxs = mx.model.load_checkpoint(str(tmp_path / "params" / MODEL), 2)
    assert {value.dtype for value in (*args.values(), *auxs.values())} == {np.float32}
    assert symbol.list_outputs() == ["softmax_output"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet20_v1b"}, ["close names"]),
        ({"rec_train": "none.rec"}, ["no such file"]),
        ({"resume_epoch": 1, "resume_params": "none.params"}, ["--resume-params none.params", "no such file"]),
    ],
)
def test_bad_input_is_one_line(run, changes, words):
    result = run(**changes)
    assert result.status == 2
    for word in words:
        assert word in result.error
