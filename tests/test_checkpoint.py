"""``save_checkpoint`` and ``load_checkpoint``: files of one step, which appear together, and a run that goes on."""

import json
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit.modules import module_of, run_of, symbol_of, train_on_random_numbers, warnings_of_another_step
from mxnet import autograd, gluon

import mxmp


def values(net):
    mx.nd.waitall()
    return {name: param._reduce().asnumpy() for name, param in net.collect_params().items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_the_parameters_are_a_plain_fp32_file(tmp_path):
    net, trainer = run_of("params=float16", 1)
    train_on_random_numbers(net, trainer, 2)
    mxmp.save_checkpoint(str(tmp_path / "run"), net, trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.params", "run.states"]
    plain, _ = run_of("bfloat16", 2)
    mxmp.restore(plain).load_parameters(str(tmp_path / "run.params"))
    same(values(net), values(plain))
    assert mxmp.load_checkpoint(str(tmp_path / "run"), net, trainer) is None


def test_wrong_kinds_are_refused_in_words(tmp_path):
    net, trainer = run_of("bfloat16", 1)
    module = module_of("bfloat16", 1)
    plain = gluon.Trainer(net.collect_params(), "sgd")
    cases = [
        ((net,), "needs its mxmp.Trainer, got NoneType"),
        ((net, plain), "needs its mxmp.Trainer, got Trainer"),
        ((module, trainer), "leave out the trainer"),
        ((mx.mod.Module(symbol_of()),), "expected a gluon Block"),
    ]
    for given, message in cases:
        for call in (mxmp.save_checkpoint, mxmp.load_checkpoint):
            with pytest.raises(TypeError, match=message):
                call(str(tmp_path / "run"), *given)
    with pytest.raises(RuntimeError, match=r"init_optimizer\(\) first"):
        mxmp.save_checkpoint(str(tmp_path / "run"), mxmp.Module(symbol_of()))
    assert not list(tmp_path.iterdir())


def damaged(tmp_path, what):
    if what == "no folder":
        return "nowhere/run"
    file = tmp_path / f"run.{what}"
    if what in ("json", "format"):
        file = tmp_path / "run.json"
        other = {"format": "another"} if what == "format" else {"numpy": ["MT19937", [1, 2], 0, 0, 0.0]}
        file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    elif what == "states":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        file.unlink()
    return str(tmp_path / "run")


@pytest.mark.parametrize("what", ["json", "format", "states", "params", "no folder"])
def test_a_damaged_checkpoint_changes_nothing(what, tmp_path):
    net, trainer = run_of("params=float16", 1)
    train_on_random_numbers(net, trainer, 2)
    mxmp.save_checkpoint(tmp_path / "run", net, trainer)
    again, resumed = run_of("params=float16", 2)
    train_on_random_numbers(again, resumed, 1)
    before, numbers = values(again), np.random.get_state()[1].tolist()
    with pytest.raises((ValueError, OSError, mx.MXNetError)):
        mxmp.load_checkpoint(damaged(tmp_path, what), again, resumed)
    same(values(again), before)
    assert np.random.get_state()[1].tolist() == numbers
    assert resumed.scaled_step.steps == 1


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    net, trainer = run_of("bfloat16", 1)
    train_on_random_numbers(net, trainer, 1)
    mxmp.save_checkpoint(tmp_path / "run", net, trainer, epoch=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    train_on_random_numbers(net, trainer, 1)
    monkeypatch.setattr(net, "save_parameters", lambda path: Path(path).write_bytes(b"half of it"))
    with pytest.raises(OSError, match="is the disk full"):
        mxmp.save_checkpoint(tmp_path / "run", net, trainer, epoch=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- states of another step --------------------------------------------------------------------------


def test_a_checkpoint_of_several_devices_is_of_one_step(tmp_path, caplog):
    """MXNet saves the mean over the devices: equal weights may differ by a bit, and running statistics do differ."""
    devices = [mx.cpu(k) for k in range(3)]
    runs = []
    for seed in (1, 2):
        net, _ = run_of("params=float16", seed)
        net.collect_params().reset_ctx(devices)
        runs.append((net, mxmp.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore="device")))
    net, trainer = runs[0]
    for step in range(3):
        with autograd.record():
            inputs = [mx.nd.random.normal(step, k + 1, (4, 4), ctx=ctx) for k, ctx in enumerate(devices)]
            losses = [(net(x) ** 2).sum() for x in inputs]
        trainer.backward(losses)
        trainer.step(6)
    mxmp.save_checkpoint(tmp_path / "run", net, trainer)
    mxmp.load_checkpoint(tmp_path / "run", *runs[1])
    for name, value in values(net).items():
        np.testing.assert_allclose(value, values(runs[1][0])[name], rtol=1e-6, err_msg=name)
    assert not warnings_of_another_step(caplog)
