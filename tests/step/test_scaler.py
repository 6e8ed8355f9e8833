"""The scalers: traces equal the algorithm written out here, limits hold, states come back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.processes import run_program

import mxmp
from mxmp import DynamicLossScaler, NoLossScaler, StaticLossScaler
from mxmp.step.scaler import as_scaler, check_count

outcomes = st.lists(st.booleans(), max_size=200)
arguments = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**e for e in range(-4, 25)] + [3.0, 1000.0]),
        "growth_factor": st.sampled_from([1.5, 2.0, 4.0, 1e30]),
        "backoff_factor": st.sampled_from([0.1, 0.25, 0.5, 0.9]),
        "growth_interval": st.integers(1, 5),
        "min_scale": st.sampled_from([2.0**-10, 2.0**-4]),
        "max_scale": st.sampled_from([2.0**24, 2.0**100, 2.0**127]),
        "hysteresis": st.integers(1, 4),
    }
)


def written_out(
    outcome_list, init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
):
    """Dynamic loss scaling with Megatron-LM's hysteresis, straight from its description."""
    scale, clean, left = init_scale, 0, hysteresis
    trace = []
    for finite in outcome_list:
        if finite:
            clean += 1
            if clean == growth_interval:
                clean, left = 0, hysteresis
                scale = scale * growth_factor if scale * growth_factor < max_scale else max_scale
        else:
            clean, left = 0, left - 1
            if left <= 0:
                scale = scale * backoff_factor if scale * backoff_factor > min_scale else min_scale
        trace.append(scale)
    return trace


def trace(scaler, outcome_list):
    found = []
    for finite in outcome_list:
        scaler.adjust(finite)
        found.append(scaler.loss_scale)
    return found


@given(outcomes, arguments)
@settings(max_examples=examples(300))
def test_the_trace_of_scales_equals_the_algorithm_written_out(outcome_list, args):
    assert trace(DynamicLossScaler(**args), outcome_list) == written_out(outcome_list, **args)


def test_growth_stops_at_the_ceiling_and_goes_on_from_there():
    scaler = DynamicLossScaler(init_scale=2.0**22, growth_interval=1)
    assert trace(scaler, [True] * 4) == [2.0**23, 2.0**24, 2.0**24, 2.0**24]
    scaler.adjust(False)
    assert scaler.loss_scale == 2.0**23


def test_backoff_stops_at_the_floor_and_says_so():
    scaler = DynamicLossScaler(init_scale=4, min_scale=1)
    assert not scaler.at_floor
    assert trace(scaler, [False] * 4) == [2.0, 1.0, 1.0, 1.0]
    assert scaler.at_floor


def test_an_overflow_restarts_the_growth_interval():
    scaler = DynamicLossScaler(init_scale=8, growth_interval=3)
    assert trace(scaler, [True, True, False, True, True, True]) == [8, 8, 4, 4, 4, 8]


def test_hysteresis_tolerates_overflows_until_used_up_and_is_restored_by_growth():
    scaler = DynamicLossScaler(init_scale=8, growth_interval=2, hysteresis=2)
    assert trace(scaler, [False, True, False, False]) == [8, 8, 4, 2]
    assert trace(scaler, [True, True, False, False]) == [2, 4, 4, 2]


def test_the_defaults_are_those_of_the_literature():
    state = DynamicLossScaler().state_dict()
    assert state["scale"] == 2.0**16
    assert [state[k] for k in ("growth_factor", "backoff_factor", "growth_interval")] == [2, 0.5, 2000]
    assert [state[k] for k in ("min_scale", "max_scale", "hysteresis")] == [2.0**-14, 2.0**24, 1]


@pytest.mark.parametrize("scaler", [StaticLossScaler(128), NoLossScaler(), DynamicLossScaler()], ids=repr)
def test_all_scalers_share_the_same_methods(scaler):
    scale = scaler.loss_scale
    assert scaler.scale(3.0) == 3.0 * scale
    assert scaler.unscale(3.0 * scale) == 3.0
    scaler.adjust(True)
    assert scaler.loss_scale == scale
    assert isinstance(scaler.at_floor, bool)


def test_a_static_scale_never_moves():
    scaler = StaticLossScaler(128)
    assert trace(scaler, [True, False, False, True]) == [128] * 4
    assert trace(NoLossScaler(), [True, False]) == [1, 1]


@given(outcomes, outcomes, arguments)
@settings(max_examples=examples(200))
def test_a_state_taken_anywhere_continues_the_same_trace(before, after, args):
    scaler = DynamicLossScaler(**args)
    trace(scaler, before)
    other = DynamicLossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert trace(other, after) == trace(scaler, after)


class Stepped(StaticLossScaler):
    """A subclass with an argument of its own."""

    ARGUMENTS = ("steps",)

    def __init__(self, scale, steps=1):
        super().__init__(scale)
        self.steps = check_count("steps", steps)


class Patient(DynamicLossScaler):
    """A subclass with one more argument, after those that it inherits."""

    ARGUMENTS = (*DynamicLossScaler.ARGUMENTS, "patience")

    def __init__(self, init_scale=8.0, *, patience=1, **arguments):
        super().__init__(init_scale, **arguments)
        self.patience = check_count("patience", patience)


class Small(DynamicLossScaler):
    """A subclass whose constructor takes nothing, and which has no arguments of its own."""

    def __init__(self):
        super().__init__(4.0)


@pytest.mark.parametrize(
    ("scaler", "other"),
    [(Stepped(64, 5), Stepped(2)), (Patient(16, patience=7, hysteresis=2), Patient()), (Small(), Small())],
)
def test_a_subclass_loads_its_own_state_by_the_method_that_it_inherits(scaler, other):
    scaler.adjust(False)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    if scaler.ARGUMENTS:
        with pytest.raises(ValueError, match="must be"):
            other.load_state_dict({**scaler.state_dict(), scaler.ARGUMENTS[-1]: 0})
        assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("tolerance"),
        lambda s: s.update(more=1),
        lambda s: s.update(kind="StaticLossScaler"),
        lambda s: s.update(scale=math.inf),
        lambda s: s.update(scale="8"),
        lambda s: s.update(scale=2.0**30),
        lambda s: s.update(growth_interval=0),
        lambda s: s.update(clean_steps=1.5),
        lambda s: s.update(clean_steps=-1),
        lambda s: s.update(tolerance=True),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil):
    scaler = DynamicLossScaler(init_scale=8)
    scaler.adjust(True)
    good = scaler.state_dict()
    bad = dict(good)
    spoil(bad)
    with pytest.raises(ValueError, match=r"expected|must"):
        scaler.load_state_dict(bad)
    assert scaler.state_dict() == good


@pytest.mark.parametrize("bad", [None, [], "state"])
@pytest.mark.parametrize("scaler", [StaticLossScaler(8), NoLossScaler(), DynamicLossScaler()], ids=repr)
def test_what_is_no_state_is_refused(scaler, bad):
    with pytest.raises(ValueError, match="not a state of"):
        scaler.load_state_dict(bad)


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("init_scale", 0, "positive"),
        ("init_scale", -1.0, "positive"),
        ("init_scale", math.inf, "positive"),
        ("init_scale", math.nan, "positive"),
        ("init_scale", 10**400, "positive"),
        ("init_scale", "65536", "positive"),
        ("init_scale", True, "positive"),
        ("init_scale", 2.0**25, "between min_scale and max_scale"),
        ("growth_factor", 1.0, "above 1"),
        ("growth_factor", math.inf, "positive"),
        ("backoff_factor", 1.0, "below 1"),
        ("backoff_factor", 0.0, "positive"),
        ("growth_interval", 0, "at least 1"),
        ("growth_interval", 2.5, "integer"),
        ("hysteresis", 0, "at least 1"),
        ("min_scale", 0, "positive"),
        ("min_scale", 2.0**-140, "FP32"),
        ("max_scale", math.inf, "positive"),
        ("max_scale", 1e39, "FP32"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(argument, value, allowed):
    with pytest.raises(ValueError, match=argument) as error:
        DynamicLossScaler(**{argument: value})
    assert allowed in str(error.value)


@pytest.mark.parametrize("scale", [0, -2, math.nan, math.inf, "2", None, 1e39, 10**400])
def test_a_bad_static_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a positive"):
        StaticLossScaler(scale)


@pytest.mark.parametrize(
    ("given_scale", "expected"),
    [
        ("dynamic", DynamicLossScaler),
        (128, StaticLossScaler),
        (0.5, StaticLossScaler),
        (None, NoLossScaler),
    ],
)
def test_loss_scale_arguments_become_scalers(given_scale, expected):
    assert type(as_scaler(given_scale)) is expected
    scaler = DynamicLossScaler(init_scale=2)
    assert as_scaler(scaler) is scaler


def test_dynamic_means_no_scaling_where_the_range_is_that_of_fp32():
    assert type(as_scaler("dynamic", only_bfloat16=True)) is NoLossScaler
    assert type(as_scaler(DynamicLossScaler(), only_bfloat16=True)) is DynamicLossScaler


@pytest.mark.parametrize(
    "bad", ["auto", True, [2], 0, -1.0, object(), np.bool_(True), *np.float32(["inf", "nan"]), np.ones(1), "128", 1j]
)
def test_a_bad_loss_scale_names_what_is_allowed(bad):
    with pytest.raises(ValueError, match=r"scale must be.* positive"):
        as_scaler(bad)


def test_the_scaler_module_runs_without_mxnet():
    path = Path(mxmp.__file__).parent / "step" / "scaler.py"
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('scaler', {str(path)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.DynamicLossScaler().adjust(False)\n"
        "assert not {'mxnet', 'numpy'} & set(sys.modules)\n"
    )
    run_program("-c", program)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.float16])
def test_numpy_s_numbers_are_numbers(kind):
    assert as_scaler(kind(128)).loss_scale == 128.0
    assert type(as_scaler(kind(128)).loss_scale) is float
    scaler = DynamicLossScaler(kind(128), growth_factor=kind(2), growth_interval=np.int32(3), max_scale=kind(1024))
    assert json.loads(json.dumps(scaler.state_dict())) == scaler.state_dict()
    for _ in range(3):
        scaler.adjust(True)
    assert scaler.loss_scale == 256.0
