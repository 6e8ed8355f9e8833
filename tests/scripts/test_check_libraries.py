"""A part of ``scripts/dev.py check libraries``: the two that the extras install."""

import pytest
from checks import libraries


@pytest.mark.slow
def test_gluoncv_and_gluonnlp_train_alike_in_three_dtypes(capsys):
    assert libraries.main(["--libraries", "gluoncv", "gluonnlp"]) == 0
    said = capsys.readouterr().out
    for name in ("gluoncv", "gluonnlp"):
        assert said.count(f"| {name} | ") == 3


def test_losses_that_differ_are_an_error(monkeypatch, capsys):
    losses = {"float32": (2.0, 1.0), "bfloat16": (2.0, 1.05), "float16": (2.0, 1.2)}
    monkeypatch.setitem(libraries.LIBRARIES, "gluoncv", losses.get)
    assert libraries.main(["--libraries", "gluoncv"]) == 1
    assert "| float16 | 2.0000 | 1.2000 |" in capsys.readouterr().out
