"""A part of ``scripts/dev.py check equal-workers``, which runs all 19 optimizers for 50 steps, with Horovod too."""

import pytest
from checks import equal_workers as check_equal_workers


@pytest.mark.slow
@pytest.mark.parametrize("store", check_equal_workers.installed_stores())
def test_two_workers_are_equal_at_every_step(store, capfd):
    """SGLD draws other noise on every worker."""
    assert check_equal_workers.main(["--steps", "12", "--stores", store, "--optimizers", "adam", "sgld"]) == 0
    said = capfd.readouterr().out
    for name in ("adam", "sgld"):
        assert f"| {name} | equal, 2 of 12 skipped |" in said


def test_a_difference_is_an_error_and_shown(monkeypatch, capsys):
    monkeypatch.setattr(
        check_equal_workers, "run", lambda *key: {"steps": 3, "skipped": 1, "differ": "weights differ at step 2"}
    )
    assert check_equal_workers.main(["--stores", "dist_sync", "--optimizers", "adam"]) == 1
    assert "| adam | weights differ at step 2 |" in capsys.readouterr().out
