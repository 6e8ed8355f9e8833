"""One scaled step without a frontend: check, apply or skip, adjust, count, log."""

from __future__ import annotations

import copy
import logging
import math
import pickle

import mxnet as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.steps import CLEAN, SPOILED, run

import mxmp
from mxmp.step.gradients import Gradient
from mxmp.step.step import FLOOR_PATIENCE, ScaledStep, ScaleEvent
from mxmp.step.updater import rescaled


def test_finite_gradients_are_applied_and_others_are_skipped_and_named_until_the_next_step():
    step = ScaledStep(mxmp.DynamicLossScaler())
    for gradients, named in ((CLEAN, ()), (SPOILED, ("b on cpu(1)",)), (CLEAN, ())):
        assert run(step, gradients) == (not named)
        assert step.last_step_skipped == bool(named)
        assert step.overflow_params == named
    assert (step.steps, step.skipped_steps) == (3, 1)


@pytest.mark.parametrize("scaler", [mxmp.StaticLossScaler(8), mxmp.NoLossScaler()], ids=repr)
def test_static_and_no_scaling_still_skip_an_overflow(scaler):
    step = ScaledStep(scaler)
    assert not run(step, SPOILED)
    assert step.skipped_steps == 1
    assert step.loss_scale == scaler.loss_scale


@given(st.lists(st.booleans(), max_size=30))
@settings(max_examples=examples(25))
def test_the_history_holds_one_event_per_skip_and_per_change_of_scale(outcomes):
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=2.0**20, growth_interval=3, hysteresis=2))
    events, before = [ScaleEvent(1, 2.0**20, False)], 2.0**20
    for number, finite in enumerate(outcomes, 1):
        run(step, CLEAN if finite else SPOILED)
        if not finite or step.loss_scale != before:
            events.append(ScaleEvent(number + 1, step.loss_scale, not finite))
        before = step.loss_scale
    assert step.history == events
    assert step.skipped_steps == outcomes.count(False)


def test_each_change_of_scale_and_each_skip_writes_one_line(caplog):
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=8, growth_interval=2))
    with caplog.at_level(logging.INFO, logger="mxmp"):
        for gradients in (CLEAN, CLEAN, CLEAN, SPOILED, CLEAN):
            run(step, gradients)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "loss scale 8 -> 16 after step 2"),
        ("WARNING", "step 4 skipped: non-finite gradients in b on cpu(1); loss scale 16 -> 8"),
    ]


def test_the_first_skips_are_a_search_and_later_ones_a_warning(caplog):
    step = ScaledStep(mxmp.DynamicLossScaler())
    with caplog.at_level(logging.INFO, logger="mxmp"):
        for gradients in [SPOILED] * 13 + [CLEAN]:
            run(step, gradients)
    said = [(r.levelname, r.getMessage().startswith("finding the loss scale: step")) for r in caplog.records]
    assert said == [("INFO", True)] * 11 + [("WARNING", False)] * 2


def test_a_search_ends_at_the_first_update(caplog):
    step = ScaledStep(mxmp.DynamicLossScaler())
    for gradients in (SPOILED, CLEAN, SPOILED):
        run(step, gradients)
    assert [(r.levelname, r.getMessage()[:14]) for r in caplog.records] == [("WARNING", "step 3 skipped")]


def test_a_long_list_of_culprits_is_shortened_in_the_log_and_whole_in_overflow_params(caplog):
    step = ScaledStep(mxmp.DynamicLossScaler())
    run(step, CLEAN)
    run(step, [Gradient(f"p{i}", mx.nd.full(2, math.inf)) for i in range(9)])
    assert "p0 on cpu(0), p1 on cpu(0), p2 on cpu(0) and 6 more" in caplog.text
    assert len(step.overflow_params) == 9


def test_squares_beyond_fp32_are_confirmed_before_they_count_as_overflow():
    step = ScaledStep(mxmp.DynamicLossScaler())
    assert run(step, [Gradient("huge", mx.nd.full(4, 1e30))])
    assert step.skipped_steps == 0


def test_a_step_that_fails_in_the_update_is_not_counted():
    step = ScaledStep(mxmp.DynamicLossScaler())

    def fail():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        step.run(CLEAN, fail)
    assert step.steps == 0


@given(st.lists(st.booleans(), max_size=12), st.lists(st.booleans(), max_size=12))
@settings(max_examples=examples(20))
def test_a_state_continues_the_same_counters_history_and_scale(before, after):
    def fresh():
        return ScaledStep(mxmp.DynamicLossScaler(init_scale=2.0**24, growth_interval=2, hysteresis=2))

    step, other = fresh(), fresh()
    for finite in before:
        run(step, CLEAN if finite else SPOILED)
    other.load_state_dict(step.state_dict())
    for finite in after:
        run(step, CLEAN if finite else SPOILED)
        run(other, CLEAN if finite else SPOILED)
    assert other.state_dict() == step.state_dict()


def resumed(step):
    other = ScaledStep(mxmp.DynamicLossScaler())
    other.load_state_dict(step.state_dict())
    return other


@pytest.mark.parametrize(
    "copied", [resumed, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))], ids=["state", "copy", "pickle"]
)
def test_a_state_and_a_copy_go_on_with_the_count_towards_the_floors_error(copied):
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=1, min_scale=1))
    for _ in range(FLOOR_PATIENCE - 1):
        run(step, SPOILED)
    other = copied(step)
    with pytest.raises(FloatingPointError):
        run(other, SPOILED)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("steps"),
        lambda s: s.update(scaler={"kind": "DynamicLossScaler"}),
        lambda s: s.update(history=[[1]]),
        lambda s: s.update(history=3),
        lambda s: s.update(skipped_steps="many"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil):
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=8))
    run(step, SPOILED)
    good = step.state_dict()
    bad = {**step.state_dict()}
    spoil(bad)
    with pytest.raises(ValueError, match="state"):
        step.load_state_dict(bad)
    assert step.state_dict() == good


def test_rescale_grad_is_put_back_whatever_happens():
    optimizer = mx.optimizer.create("sgd", rescale_grad=0.25)
    seen = []

    def update():
        seen.append(float(optimizer.rescale_grad))
        raise KeyError

    with pytest.raises(KeyError), rescaled(optimizer, 0.5):
        update()
    assert seen == [0.125]
    assert optimizer.rescale_grad == 0.25
    assert type(optimizer.rescale_grad) is float


@pytest.mark.parametrize(("factor", "text"), [(2.0**-16, "0.000015258789"), (2.0**-4, "0.0625"), (3.0, "3")])
def test_what_kernels_read_has_no_exponent(factor, text):
    optimizer = mx.optimizer.create("sgd", rescale_grad=1.0)
    with rescaled(optimizer, factor):
        assert str(optimizer.rescale_grad) == text


class Halving:
    """A scaler with the members that the manual requires of a user's own, and nothing more."""

    def __init__(self, scale=2.0**10):
        self.loss_scale = scale

    def adjust(self, grads_finite):
        self.loss_scale *= 1 if grads_finite else 0.5

    def state_dict(self):
        return {"scale": self.loss_scale}

    def load_state_dict(self, state):
        self.loss_scale = state["scale"]


def test_a_scaler_of_the_users_needs_four_members_only():
    step = ScaledStep(Halving())
    run(step, SPOILED)
    assert (step.loss_scale, step.skipped_steps) == (2.0**9, 1)
    run(step, CLEAN)
    assert (step.loss_scale, step.steps) == (2.0**9, 2)
    other = ScaledStep(Halving())
    other.load_state_dict(step.state_dict())
    assert (other.loss_scale, other.steps, other.skipped_steps) == (2.0**9, 2, 1)
