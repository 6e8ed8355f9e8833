"""The search: what wins, what fails, and what is left out."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.measuring import two
from kit.processes import run_program

import mxmp
from mxmp.tuning import search
from mxmp.tuning.clock import Cast, Timed
from mxmp.tuning.search import CONVERTED, FULL, fastest

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ({FULL: [10, 10, 10, 10], "rules": [9, 9, 9, 9], "least time": [8, 8, 8, 8]}, "least time"),
        ({FULL: [10, 10, 10, 10], "rules": [11, 11, 11, 11]}, FULL),
        ({FULL: [10, 12, 10, 12], "rules": [11, 11, 11, 11]}, FULL),  # within the spread
        ({FULL: [10, 20, 10, 20], "rules": [9, 18, 9, 18]}, "rules"),  # one round's times belong together
        ({FULL: [10, 10, 10, 10], CONVERTED: [7, 7, 7, 7], "rules": [8, 8, 8, 8]}, CONVERTED),
        ({FULL: [7, 7, 7, 7], CONVERTED: [9, 9, 9, 9], "rules": [8, 8, 8, 8]}, FULL),
        ({FULL: [10, 10, 10, 10]}, FULL),
        ({FULL: [10, 10, 10, 10], "rules": [8, 9, 8, 8], "least time": [7, 9, 9, 7]}, "rules"),  # as fast
        ({FULL: [10, 10, 10, 10], "rules": [9, 11, 9, 11], "least time": [8, 9, 9, 9]}, "least time"),
    ],
)
def test_low_precision_must_win_in_three_of_four_rounds(times, want):
    assert fastest(times) == want


@pytest.mark.parametrize("low_fails", [True, False], ids=["low precision", "FP32 with workarounds"])
def test_where_one_kind_of_plan_fails_the_other_is_still_compared_and_the_plan_says_so(low_fails, monkeypatch):
    timed = search.PlanSearch._timed

    def failing(self, low):
        if bool(low) == low_fails:
            raise mx.MXNetError("MXNetError: no such kernel")
        return timed(self, low)

    monkeypatch.setattr(search.PlanSearch, "_timed", failing)
    plan = mxmp.tune(mx.sym.clip(two(), 0, 6), data=(2, 6), cache=False)
    failed = "bfloat16" if low_fails else "float32, converted"
    assert f"{failed} fails here (MXNetError: no such kernel)" in str(plan)
    if low_fails:
        assert plan.num_low == 0
        assert "FP32: no plan in bfloat16 was faster" in str(plan)
        assert plan.decisions["a"].reason == "bfloat16 could not be timed here"
    else:
        assert {"float32", "rules"} <= set(plan.tuned.gains)


def test_a_candidate_that_fails_in_a_later_round_is_left_out_and_named(monkeypatch):
    def failing(self, *args):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 1 and any(isinstance(owner, Cast) for owner in self._owners):
            raise mx.MXNetError("MXNetError: out of memory")
        return step(self)

    step = Timed.whole_step
    monkeypatch.setattr(Timed, "whole_step", failing)
    plan = mxmp.tune(two(), data=(2, 6), cache=False)
    assert "rules fails here (MXNetError: out of memory)" in str(plan)
    assert "rules" not in plan.tuned.steps
    assert FULL in plan.tuned.steps
    assert plan.num_low == 0


CAPPED = """
import mxnet as mx, mxmp
from mxnet.gluon import nn
net = nn.Conv2D(16, 3, prefix="c_")
net.initialize()
plan = mxmp.tune(net, (2, 3, 16, 16), cache=False)
assert plan.num_low == 0, plan
print(plan)
"""


@pytest.mark.slow
def test_without_an_instruction_set_for_bfloat16_the_plan_is_fp32_and_says_so():
    """oneDNN reads what it may use when it is first called: in a process of its own."""
    printed = run_program("-c", CAPPED, DNNL_MAX_CPU_ISA="AVX2", MXMP_WITHOUT="emulated_bfloat16")
    assert "bfloat16 fails here" in printed
    assert "FP32: no plan in bfloat16 was faster" in printed
