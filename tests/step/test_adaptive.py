"""The adaptive scaler: it follows what is measured, stays within limits, comes back from a file, and waits once."""

from __future__ import annotations

import json
import math

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.nets import CASTS, forward, two_layers

import mxmp
from mxmp import AdaptiveLossScaler
from mxmp.step.gradients import Gradient, fetch, zeros_and_peaks
from mxmp.step.step import ScaledStep

LARGEST = 65504.0


class Gradients:
    """Values over a range of exponents, as float16 holds them at a scale; some are zero at any scale."""

    def __init__(self, low=-40, high=-20, dead=0.0, hidden=0.0):
        self.values = np.exp2(np.linspace(low, high, 500))
        self.dead, self.hidden = dead, hidden

    def at(self, scale):
        """Share of zeros, largest, and whether nothing overflowed; ``hidden``: a larger one that is not measured."""
        scaled = self.values * scale
        zeros = self.dead + (1 - self.dead) * (scaled < 2.0**-25).mean()
        return zeros, scaled.max(), max(scaled.max(), self.hidden * scale) <= LARGEST


def train(scaler, gradients, steps):
    """Scale of each step, and whether it was skipped."""
    trace = []
    for _ in range(steps):
        zeros, largest, finite = gradients.at(scaler.loss_scale)
        trace.append((scaler.loss_scale, not finite))
        if scaler.measures and finite:
            scaler.note_gradients(zeros, largest)
        scaler.adjust(finite)
    return trace


def test_it_rises_at_once_to_where_no_gradient_is_lost_and_no_further():
    gradients = Gradients(low=-45, high=-30)
    trace = train(AdaptiveLossScaler(), gradients, 200)
    final = trace[-1][0]
    assert final == 2.0**20  # 2**-45 * 2**20 is the smallest that float16 holds
    assert trace[4][0] == final
    assert not any(skipped for _, skipped in trace)
    assert gradients.at(2.0**16)[0] > 0.1


def test_it_leaves_the_margin():
    scaler = AdaptiveLossScaler(init_scale=1.0, margin=3)
    final = train(scaler, Gradients(low=-60, high=-2.0), 200)[-1][0]
    largest = 0.25 * final
    assert largest * 2**3 <= LARGEST < largest * 2**4


def test_it_falls_before_the_largest_overflows():
    scaler, gradients = AdaptiveLossScaler(init_scale=2.0**16, measure_interval=2), Gradients(high=-10)
    trace = []
    for _ in range(40):  # the gradients grow by a factor of 2 every 4 steps
        gradients.values = gradients.values * 2.0**0.25
        trace += train(scaler, gradients, 1)
    assert not any(skipped for _, skipped in trace)
    assert trace[-1][0] == 2.0**15  # the largest is 1 by now


def test_zeros_that_no_scale_removes_cost_one_rise_in_an_interval():
    scaler = AdaptiveLossScaler(init_scale=1024.0, growth_interval=50)
    trace = train(scaler, Gradients(low=-10, high=-5, dead=0.6), 120)
    assert [scale for scale, _ in trace[:49]] == [1024.0] + [2048.0] * 48
    assert trace[-1][0] == 8192.0


def test_what_large_first_gradients_took_is_won_back_as_soon_as_they_are_small():
    """The overflows of the first steps say nothing of later ones; a dynamic scaler would wait 2,000 steps for each."""
    scaler, gradients = AdaptiveLossScaler(margin=3), Gradients(low=-30, high=8)
    first = train(scaler, gradients, 20)
    assert sum(skipped for _, skipped in first) == 9
    gradients.values = gradients.values * 2.0**-10
    trace = train(scaler, gradients, 100)
    assert not any(skipped for _, skipped in trace)
    assert trace[-1][0] == 2.0**14  # from 64; the largest is 1 / 4 and keeps room for 8 times more


def test_a_hidden_overflow_is_a_ceiling_until_an_interval_has_passed():
    scaler = AdaptiveLossScaler(init_scale=2.0**10, growth_interval=100)
    gradients = Gradients(low=-60, high=-20, hidden=LARGEST / 2.0**14)
    trace = train(scaler, gradients, 250)
    assert max(scale for scale, _ in trace) == 2.0**15
    skips = [step for step, (_, skipped) in enumerate(trace) if skipped]
    assert len(skips) == 3
    assert min(b - a for a, b in zip(skips, skips[1:])) >= 100


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 1e6)), max_size=120),
    st.integers(1, 5),
    st.integers(1, 6),
)
@settings(max_examples=examples(200))
def test_whatever_is_measured_the_scale_stays_within_its_limits_and_a_copy_goes_on_alike(steps, interval, margin):
    def one():
        return AdaptiveLossScaler(2.0**8, growth_interval=7, min_scale=4.0, max_scale=2.0**20, margin=margin,
                                  measure_interval=interval, hysteresis=2)  # fmt: skip

    scaler = one()
    for finite, zeros, largest in steps:
        copy = AdaptiveLossScaler()
        copy.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
        for each in (scaler, copy):
            if each.measures and finite:
                each.note_gradients(zeros, largest)
            each.adjust(finite)
        assert copy.state_dict() == scaler.state_dict()
        assert 4.0 <= scaler.loss_scale <= 2.0**20


def test_a_damaged_state_changes_nothing():
    scaler = AdaptiveLossScaler(1024.0)
    before = scaler.state_dict()
    damage = {"room": 10**400, "largest": math.inf, "futile": 3, "before_rise": "x", "margin": 0, "until_measured": 1.5}
    for name, value in damage.items():
        with pytest.raises(ValueError, match=name):
            scaler.load_state_dict({**before, name: value})
        assert scaler.state_dict() == before
    with pytest.raises(ValueError, match="not a state of AdaptiveLossScaler"):
        scaler.load_state_dict(mxmp.DynamicLossScaler().state_dict())


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_zeros", 2, ""),
        ("margin", 0, ""),
        ("margin", 2000, " must be below 16"),
        ("measure_interval", 0.5, ""),
        ("max_scale", 1, ""),
    ],
)
def test_arguments_are_checked(name, value, allowed):
    with pytest.raises(ValueError, match=name + allowed):
        AdaptiveLossScaler(**{name: value})


def arrays():
    rng = np.random.RandomState(0)
    half = mx.nd.array(rng.choice([0, 1e-6, -700.0], 3000), dtype="float16", ctx=mx.cpu(1))
    sparse = mx.nd.array(np.diag([0.0, -9.0, 2.0])).tostype("row_sparse")
    return [mx.nd.array([0.0, -3.0, 0.0, 1.0]), half, sparse, mx.nd.array([1e-30])]


def test_zeros_and_peaks_are_those_of_the_arrays():
    zeros, peaks = fetch(*zeros_and_peaks([Gradient("", array) for array in arrays()]))
    dense = [array.asnumpy().astype("float64") for array in arrays()]
    dense[2] = dense[2][1:]  # rows that are there
    np.testing.assert_allclose(zeros, [(a == 0).mean() for a in dense], rtol=1e-6)
    np.testing.assert_allclose(peaks, [np.abs(a).max() for a in dense], rtol=1e-3)


def test_a_sparse_gradient_without_rows_has_neither_zeros_nor_a_peak():
    nothing = Gradient("", mx.nd.sparse.zeros("row_sparse", (3, 2)))
    assert [found.tolist() for found in fetch(*zeros_and_peaks([nothing]))] == [[0], [0]]


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_tells_the_scaler_in_its_one_transfer(monkeypatch, unscaled):
    scaler = AdaptiveLossScaler(init_scale=64.0, measure_interval=3)
    told, waits = [], []
    monkeypatch.setattr(scaler, "note_gradients", lambda zeros, largest: told.append((zeros, largest)))
    plain = mx.nd.NDArray.asnumpy
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", lambda self: waits.append(1) or plain(self))
    step = ScaledStep(scaler)
    gradients = [Gradient("a", mx.nd.array([0.0, 8.0])), Gradient("b", mx.nd.array([1.0, -2.0], ctx=mx.cpu(1)))]
    for _ in range(3):
        step.run(gradients, lambda: None, unscaled=unscaled)
    assert len(waits) == 3
    assert told[0] == (0.25, 8.0 * (64.0 if unscaled else 1.0))
    step.run([Gradient("a", mx.nd.array([math.inf, 8.0]))], lambda: None)
    assert all(math.isfinite(largest) for _, largest in told)


def test_unscaled_gradients_are_told_as_they_were_scaled():
    found = []
    for unscale in (False, True):
        net = two_layers(CASTS)
        scaler = AdaptiveLossScaler(init_scale=64.0)
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scaler)
        told, note = [], scaler.note_gradients
        scaler.note_gradients = lambda *args, told=told, note=note: (told.append(args), note(*args))
        trainer.backward(forward(net, 0))
        if unscale:
            trainer.unscale()
        trainer.step(4)
        found += told
    assert found[0] == found[1]
    assert found[0][1] > 1


def test_of_trainers_that_share_it_the_larger_gradient_and_the_mean_of_zeros_count():
    scaler = AdaptiveLossScaler(init_scale=16.0)
    scaler.note_gradients(0.0, 40000.0)
    scaler.note_gradients(0.5, 1.0)
    scaler.adjust(True)
    assert scaler.loss_scale == 8.0
    scaler = AdaptiveLossScaler(init_scale=16.0, max_zeros=0.3)
    scaler.note_gradients(0.5, 1.0)
    scaler.note_gradients(0.0, 1.0)
    scaler.adjust(True)
    assert scaler.loss_scale == 16.0


def test_the_zeros_of_three_trainers_count_alike():
    """Their mean is 0.2 in any order; a mean of the last one and the mean before it would be 0.3 or 0.15."""
    for order in ([0.0, 0.0, 0.6], [0.6, 0.0, 0.0], [0.0, 0.6, 0.0]):
        for limit, raised in ((0.19, True), (0.21, False)):
            scaler = AdaptiveLossScaler(max_zeros=limit)
            scaler.note_gradients(1.0, 1.0)
            scaler.loss_scale = 2.0**8  # drops what was measured at another scale
            for zeros in order:
                scaler.note_gradients(zeros, 1.0)
            scaler.adjust(True)
            assert (scaler.loss_scale > 2.0**8) == raised
