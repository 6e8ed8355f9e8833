"""Files of states know the weights that they were saved with, and say once that others are there."""

from __future__ import annotations

import pytest
from kit.modules import module_of, run_of, train_module, train_on_random_numbers

import mxmp
from mxmp.step import state_file

POLICIES = ["float16", "params=float16", "bfloat16"]


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if "other values" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_states_of_another_step_than_the_parameters_are_said_to_be_once(policy, tmp_path, caplog):
    net, trainer = run_of(policy or "bfloat16", 1)
    if policy is None:
        mxmp.restore(net)
    for step in (1, 2):
        train_on_random_numbers(net, trainer, 1)
        net.save_parameters(str(tmp_path / f"{step}.params"))
        trainer.save_states(str(tmp_path / f"{step}.states"))
    for params, states, expected in ((1, 1, 0), (2, 2, 0), (2, 1, 1), (1, 2, 1)):
        again, resumed = run_of(policy or "bfloat16", 2)
        again.load_parameters(str(tmp_path / f"{params}.params"))
        resumed.load_states(str(tmp_path / f"{states}.states"))
        found = warnings_of(caplog)
        assert len(found) == expected
        train_on_random_numbers(again, resumed, 1)
        assert not warnings_of(caplog)
        if expected:
            assert "net_batchnorm0_beta and 5 more" in found[0]
            assert f"{states}.states" in found[0]
            assert "save_checkpoint" in found[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_is_told_too(policy, tmp_path, caplog):
    module = module_of(mxmp.Module, policy, 1)
    for step in (1, 2):
        train_module(module, 1)
        module.save_checkpoint(str(tmp_path / "m"), step, True)
    for params, states, expected in ((1, 1, 0), (2, 2, 0), (2, 1, 1)):
        again = module_of(mxmp.Module, policy, 2)
        again.load_params(str(tmp_path / f"m-000{params}.params"))
        again.load_optimizer_states(str(tmp_path / f"m-000{states}.states"))
        assert len(warnings_of(caplog)) == expected


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
    assert not warnings_of(caplog)


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_of_another_step_behind_states_are_said_to_be_at_the_first_step(policy, tmp_path, caplog):
    net, trainer = run_of(policy, 1)
    for step in (1, 2):
        train_on_random_numbers(net, trainer, 1)
        net.save_parameters(str(tmp_path / f"{step}.params"))
        trainer.save_states(str(tmp_path / f"{step}.states"))
    for states, params, expected in ((1, 1, 0), (2, 2, 0), (1, 2, 1), (2, 1, 1), (1, None, 1)):
        again, resumed = run_of(policy, 2)
        resumed.load_states(str(tmp_path / f"{states}.states"))
        if params is not None:
            again.load_parameters(str(tmp_path / f"{params}.params"))
        assert not warnings_of(caplog)
        train_on_random_numbers(again, resumed, 1)
        found = warnings_of(caplog)
        assert len(found) == expected
        assert all(f"{states}.states" in each for each in found)
        train_on_random_numbers(again, resumed, 1)
        assert not warnings_of(caplog)
        assert not resumed.scaled_step.observers  # later steps read no weights


def test_a_module_that_gets_parameters_of_another_step_behind_its_states_is_told_at_its_update(tmp_path, caplog):
    module = module_of(mxmp.Module, "params=float16", 1)
    for step in (1, 2):
        train_module(module, 1)
        module.save_checkpoint(str(tmp_path / "m"), step, True)
    for states, params, expected in ((1, 1, 0), (1, 2, 1)):
        module.load_params(str(tmp_path / f"m-000{states}.params"))
        module.load_optimizer_states(str(tmp_path / f"m-000{states}.states"))
        module.load_params(str(tmp_path / f"m-000{params}.params"))
        train_module(module, 1)
        assert len(warnings_of(caplog)) == expected
