"""Overflows at a scale that cannot fall: what is raised, and which cure is named."""

from __future__ import annotations

import math

import mxnet as mx
import pytest
from kit.steps import CLEAN, SPOILED, run

import mxmp
from mxmp.step.gradients import Gradient
from mxmp.step.step import FLOOR_PATIENCE, ScaledStep


def test_repeated_overflow_at_the_floor_raises_and_names_the_parameters():
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=2, min_scale=1))
    for _ in range(FLOOR_PATIENCE):
        assert not run(step, SPOILED)
    with pytest.raises(FloatingPointError, match=r"scaling is not the cause.*b on cpu\(1\)"):
        run(step, SPOILED)
    assert step.skipped_steps == FLOOR_PATIENCE + 1


def refusal(scaler, *gradients, unscaled=False):
    """Return the text of the error that ends a run with these gradients."""
    step = ScaledStep(scaler)
    found = [Gradient(name, mx.nd.array(values)) for name, values in gradients]
    for _ in range(FLOOR_PATIENCE - 1):
        step.run(found, list, unscaled=unscaled)
    with pytest.raises(FloatingPointError) as error:
        step.run(found, list, unscaled=unscaled)
    return str(error.value)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_are_large_everywhere_need_a_lower_floor(unscaled):
    factor = 1 / 4 if unscaled else 1.0
    given = ("fc1_weight", [9.0 * factor, -5e4 * factor, INF]), ("fc2_weight", [3.0 * factor, 0])
    text = refusal(mxmp.DynamicLossScaler(4, min_scale=4), *given, unscaled=unscaled)
    assert "the largest finite gradient is 5e+04, or 1.25e+04 without the loss scale, of fc1_weight on cpu(0)" in text
    assert "lower the floor, loss_scale=mxmp.DynamicLossScaler(min_scale=0.00391)" in text
    static = refusal(mxmp.StaticLossScaler(4), *given)
    assert "at a loss scale of 4," in static
    assert "lower it, or use loss_scale='dynamic'" in static
    assert "min_scale=" in refusal(mxmp.AdaptiveLossScaler(4, min_scale=4), *given)


def test_one_layer_far_above_the_others_goes_to_fp32():
    text = refusal(mxmp.DynamicLossScaler(1, min_scale=1), ("fc1_weight", [5e4, INF]), ("fc2_weight", [1e-3, 0]))
    assert "of fc1_weight on cpu(0)" in text
    assert "scaling is not the cause" in text
    assert "exclude=['*fc1*']" in text


def test_where_several_layers_overflow_the_guard_finds_which():
    given = ("fc1_weight", [NAN, INF]), ("fc2_weight", [NAN, NAN]), ("fc3_weight", [1e-3, 0])
    text = refusal(mxmp.DynamicLossScaler(1, min_scale=1), *given)
    assert "the largest finite gradient is 0.001" in text
    assert "mxmp.diagnose.guard" in text


def test_without_any_finite_gradient_no_cure_of_the_gradients_is_named():
    text = refusal(mxmp.DynamicLossScaler(1, min_scale=1), ("fc1_weight", [NAN, INF]), ("fc2_weight", [NAN, 0]))
    assert "no gradient has a finite value but 0" in text
    assert "learning rate, the data and the loss" in text
    assert not any(word in text for word in ("guard", "exclude", "min_scale="))


def test_gradients_beyond_float16_that_were_never_in_it_are_no_matter_of_the_scale():
    text = refusal(mxmp.NoLossScaler(), ("fc1_weight", [1e30, INF]), ("fc2_weight", [1e30, 1e20]))
    assert "scaling is not the cause" in text


def test_a_clean_step_at_the_floor_starts_the_count_again():
    step = ScaledStep(mxmp.DynamicLossScaler(init_scale=1, min_scale=1))
    for _ in range(5):
        for _ in range(FLOOR_PATIENCE - 1):
            run(step, SPOILED)
        run(step, CLEAN)
    assert step.skipped_steps == 5 * (FLOOR_PATIENCE - 1)
