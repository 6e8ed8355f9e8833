"""Files of states know the weights that they were saved with, and say once that others are there."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.modules import module_of, run_of, train_module, train_on_random_numbers, warnings_of_another_step

import mxmp
from mxmp.step import state_file

POLICIES = ["float16", "params=float16", "bfloat16"]


@pytest.mark.parametrize("states_first", [False, True])
@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_states_of_another_step_than_the_parameters_are_said_to_be_once(policy, states_first, tmp_path, caplog):
    """At once, or at the first step where the parameters may still come."""
    net, trainer = run_of(policy or "bfloat16", 1)
    if policy is None:
        mxmp.restore(net)
    for step in (1, 2):
        train_on_random_numbers(net, trainer, 1)
        net.save_parameters(str(tmp_path / f"{step}.params"))
        trainer.save_states(str(tmp_path / f"{step}.states"))
    for params, states in ((1, 1), (2, 2), (2, 1), (1, 2), *([(None, 1)] if states_first else [])):
        again, resumed = run_of(policy or "bfloat16", 2)
        if states_first:
            resumed.load_states(str(tmp_path / f"{states}.states"))
            assert not warnings_of_another_step(caplog)
        if params is not None:
            again.load_parameters(str(tmp_path / f"{params}.params"))
        if states_first:
            train_on_random_numbers(again, resumed, 1)
        else:
            resumed.load_states(str(tmp_path / f"{states}.states"))
        found = warnings_of_another_step(caplog)
        assert len(found) == (params != states)
        for words in ("net_batchnorm0_beta and", f"{states}.states", "save_checkpoint"):
            assert all(words in each for each in found)
        train_on_random_numbers(again, resumed, 1)
        assert not warnings_of_another_step(caplog)
        assert not resumed.scaled_step.observers  # later steps read no weights


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_is_told_too(policy, tmp_path, caplog):
    module = module_of(policy, 1)
    for step in (1, 2):
        train_module(module, 1)
        module.save_checkpoint(str(tmp_path / "m"), step, True)
    for params, states, then in ((1, 1, 1), (2, 2, 2), (2, 1, 1), (1, 1, 2)):
        again = module_of(policy, 2)
        again.load_params(str(tmp_path / f"m-000{params}.params"))
        again.load_optimizer_states(str(tmp_path / f"m-000{states}.states"))
        assert len(warnings_of_another_step(caplog)) == (params != states)
        again.load_params(str(tmp_path / f"m-000{then}.params"))
        train_module(again, 1)
        assert len(warnings_of_another_step(caplog)) == (params == states != then)


def test_nothing_is_said_of_old_files_and_of_states_that_come_before_the_parameters(tmp_path, caplog):
    net, trainer = run_of("bfloat16", 1)
    train_on_random_numbers(net, trainer, 1)
    net.save_parameters(str(tmp_path / "params"))
    trainer.save_states(str(tmp_path / "states"))
    again, resumed = run_of("bfloat16", 2)
    resumed.load_states(str(tmp_path / "states"))
    again.load_parameters(str(tmp_path / "params"))
    content = state_file.read((tmp_path / "states").read_bytes())
    del content["fingerprint"]
    state_file.write(str(tmp_path / "states"), content)
    train_on_random_numbers(again, resumed, 1)
    resumed.load_states(str(tmp_path / "states"))
    assert not warnings_of_another_step(caplog)


def test_weights_that_differ_between_devices_are_known_by_what_a_file_of_parameters_has(tmp_path, caplog):
    """MXNet writes their mean, as of devices that train apart without a kvstore."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = mx.gluon.nn.Dense(3, in_units=4)
    net.initialize(ctx=devices)
    mxmp.convert(net, "bfloat16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    with mx.autograd.record():
        losses = [net(mx.nd.full((2, 4), value, ctx=ctx)).sum() for value, ctx in zip((1, 3), devices)]
    trainer.backward(losses)
    trainer.step(1)
    net.save_parameters(str(tmp_path / "params"))
    trainer.save_states(str(tmp_path / "states"))
    net.load_parameters(str(tmp_path / "params"), ctx=devices)
    trainer.load_states(str(tmp_path / "states"))
    assert not warnings_of_another_step(caplog)
