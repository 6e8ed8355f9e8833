"""Operators over many arrays: differences of arrays, each by itself, exactly."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from mxmp.step.gradients import fetch
from mxmp.step.masters import MasterPair
from mxmp.step.multi_tensor import distances, subtract_all

ALL_FINITE = np.arange(2**16, dtype=np.uint16).view(np.float16)


ALL_FINITE = np.sort(ALL_FINITE[np.isfinite(ALL_FINITE)])


def pair(master, low=None, ctx=None) -> MasterPair:
    master = mx.nd.array(np.asarray(master, np.float32), ctx=ctx)
    return MasterPair(master, master.astype("float16") if low is None else mx.nd.array(low, ctx=ctx, dtype="float16"))


def written(*pairs: MasterPair) -> list[bool]:
    return [bool(distance != 0) for distance in fetch(distances(pairs))[0]]


def test_every_float16_number_differs_from_the_next_one_and_not_from_itself():
    low, high = mx.nd.array(ALL_FINITE[:-1], dtype="float16"), mx.nd.array(ALL_FINITE[1:], dtype="float16")
    differences = high.copy()
    subtract_all([differences], [low])
    same = differences.asnumpy() == 0
    assert (ALL_FINITE[1:][same] == 0).all()  # -0 and 0
    assert same.sum() == 1
    assert written(pair(ALL_FINITE)) == [False]


@pytest.mark.parametrize("size", [1, 100, 30_000])
@pytest.mark.parametrize("value", [0.0, 2.0**-24, 1.0, -1.0, 65504.0])
def test_one_last_bit_is_noticed_in_an_array_of_any_size(size, value):
    values = np.full(size, value, np.float16)
    values[size // 2] = np.nextafter(np.float16(value), np.float16(0.5))
    assert written(pair(np.full(size, value)), pair(np.full(size, value), values)) == [False, True]
