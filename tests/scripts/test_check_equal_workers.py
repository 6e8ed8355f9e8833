"""A part of ``scripts/dev.py check equal-workers``, which runs all 19 optimizers for 50 steps, with Horovod too."""

import pytest
from checks import equal_workers as check_equal_workers


@pytest.mark.slow
@pytest.mark.parametrize("store", check_equal_workers.installed_stores())
def test_two_workers_are_equal_at_every_step(store, tmp_path, capfd):
    """SGLD draws other noise on every worker."""
    options = ["--steps", "12", "--results", str(tmp_path / "found.json"), "--stores", store]
    assert check_equal_workers.main([*options, "--optimizers", "adam", "sgld"]) == 0
    said = capfd.readouterr().out
    for name in ("adam", "sgld"):
        assert f"| {name} | equal, 2 of 12 skipped |" in said
    assert check_equal_workers.main([*options, "--optimizers", "sgld"]) == 0
    assert f"{store} sgld" not in capfd.readouterr().out  # it is not run again


def test_a_difference_is_an_error_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        check_equal_workers, "run", lambda *key: {"steps": 3, "skipped": 1, "differ": "weights differ at step 2"}
    )
    options = ["--stores", "dist_sync", "--optimizers", "adam", "--results", str(tmp_path / "found.json")]
    assert check_equal_workers.main(options) == 1
    assert "| adam | weights differ at step 2 |" in capsys.readouterr().out
