"""Exponents are counted right, and what float16 makes of them is what NumPy's float16 makes of the values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mxmp.diagnose import Histogram
from mxmp.diagnose.watching.histogram import FORMATS


def spread(low, high, size=4000):
    rng = np.random.RandomState(3)
    return (np.exp2(rng.uniform(low, high, size)) * rng.choice([-1, 1], size)).astype("float32")


def test_shares_are_those_of_a_rounding_to_float16():
    values = np.concatenate([spread(-40, 20), [0.0] * 70, [np.inf, np.nan]]).astype("float32")
    with np.errstate(over="ignore"):
        half = np.abs(values.astype("float16"))
    found = Histogram.of(values)
    n = values.size
    assert found.zeros == 70
    assert found.counted == found.size == n
    # bins end at powers of two: 2**-25 itself is a tie, and 65520 to 65536 is the share of a bin
    assert found.underflow() == pytest.approx(((half == 0).sum() - 70) / n, abs=1e-3)
    assert found.overflow() == pytest.approx(np.isinf(half).sum() / n, abs=1e-3)
    assert found.subnormal() == pytest.approx(((half > 0) & (half < 2.0**-14)).sum() / n, abs=2e-3)
    assert (found.infs, found.nans) == (1, 1)


def test_every_value_is_counted_at_its_exponent():
    found = Histogram.of(np.array([1.0, -1.5, 2.0, 0.75, 2.0**-149, 2.0**127], "float32"))
    by_exponent = dict(zip(found.exponents(), found.counts))
    assert {e: n for e, n in by_exponent.items() if n} == {0: 2, 1: 1, -1: 1, -149: 1, 127: 1}
    assert (found.smallest, found.largest) == (2.0**-149, 2.0**127)


@pytest.mark.parametrize("power", [-3, 0, 7, 130])
def test_scaling_is_the_histogram_of_the_scaled_values(power):
    values = spread(-20, 5)
    with np.errstate(over="ignore"):
        scaled = (values * 2.0**power).astype("float32")
    a, b = Histogram.of(values).scaled(power), Histogram.of(scaled)
    np.testing.assert_array_equal(a.counts, b.counts)
    assert a.infs == b.infs
    assert a.smallest == b.smallest
    assert a.largest == b.largest or b.infs


def test_two_parts_add_up_to_the_whole():
    values = np.concatenate([spread(-20, 5), [0.0, np.nan]])
    a, b = Histogram.of(values), Histogram.of(values[:1000]) + Histogram.of(values[1000:])
    np.testing.assert_array_equal(a.counts, b.counts)
    assert (a.zeros, a.nans, a.smallest, a.largest, a.size) == (b.zeros, b.nans, b.smallest, b.largest, b.size)


@pytest.mark.parametrize("largest", [1.0, 1000.0, 65504.0, 3e-6])
def test_headroom_is_the_last_power_of_two_that_fits(largest):
    room = Histogram.of(np.array([largest, -1e-7], "float32")).headroom()
    assert np.isfinite(np.float16(largest * 2.0**room))
    assert largest * 2.0 ** (room + 1) > FORMATS["float16"].largest


def test_headroom_where_there_is_nothing_and_where_it_is_too_late():
    assert Histogram.of(np.zeros(3)).headroom() == math.inf
    assert Histogram.of(np.array([1.0, np.inf])).headroom() == -math.inf
    assert Histogram.of(np.array([1e6], "float32")).headroom() == -4


def test_what_the_sample_missed_is_in_the_largest():
    found = Histogram.of(np.ones(10), size=1000, largest=5000.0)
    assert (found.largest, found.size, found.counted) == (5000.0, 1000, 10)
    assert Histogram.of(np.ones(10), largest=math.inf).infs == 1
    assert Histogram.of(np.ones(10), largest=math.nan).nans == 1
