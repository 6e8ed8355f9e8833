"""What tuning measured, in a plan: it prints, and is read as it was written."""

from __future__ import annotations

from dataclasses import replace

from kit.oracle import S

import mxmp
from mxmp import Plan
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.tuned import Tuned


def symbol():
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=4, name="a"), name="r")
    return S.FullyConnected(x, num_hidden=3, name="b")


def plan():
    found = decide(Graph.from_symbol(symbol()), mxmp.Policy(exclude=["b"]), "cpu")
    one = {"float32": 1.0, "rules": 2.5}
    gains = {"float32": (1.0, 1.0, 1.0), "rules": (1.5, 2.0, 2.5)}
    return replace(found, tuned=Tuned("rules", True, one, gains, one, {"float32": 0, "rules": 1024}, ("a note",)))


def test_a_tuned_plan_is_read_as_it_was_written(tmp_path):
    plan().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan()
    assert str(again) == str(plan())


def test_what_was_compared_prints_as_a_table():
    found = Tuned(
        "rules", True, {"float32": 0.02, "rules": 0.01}, {"rules": (1.9, 2.0, 2.1)}, {"rules": 2.2}, {}, ("note",)
    )
    assert str(found).splitlines() == [
        "           forward and backward, ms  times as fast as FP32  predicted",
        "  float32  20.0",
        "* rules    10.0                      2.00 (1.90 to 2.10)    2.20",
        "  note",
    ]
