"""What tuning measured, in a plan: it prints, and is read as it was written."""

from __future__ import annotations

from kit.plans import tuned_plan

from mxmp import Plan
from mxmp.precision.tuned import Tuned


def test_a_tuned_plan_is_read_as_it_was_written(tmp_path):
    tuned_plan().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tuned_plan()
    assert str(again) == str(tuned_plan())


def test_what_was_compared_prints_as_a_table():
    found = Tuned(
        "rules", True, {"float32": 0.02, "rules": 0.01}, {"rules": (1.9, 2.0, 2.1)}, {"rules": 2.2}, {}, ("note",)
    )
    assert str(found).splitlines() == [
        "           training step, ms  times as fast as FP32  predicted",
        "  float32  20.0",
        "* rules    10.0               2.00 (1.90 to 2.10)    2.20",
        "  note",
    ]
