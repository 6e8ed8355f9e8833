"""Finite check, norm and unscaling, on dense, row-sparse and mixed gradients of several devices."""

from __future__ import annotations

import ctypes
import errno
import math

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples

from mxmp.step import gradients
from mxmp.step.gradients import FiniteSums, Gradient, fetch, is_finite, non_finite, norm, square_sums, unscale

SMALL, LARGE = 100, 20_000  # on both sides of the size at which the reduction changes


def gradient(values, name="w", dtype="float32", ctx=None) -> Gradient:
    return Gradient(name, mx.nd.array(np.asarray(values, np.float32), ctx=ctx, dtype=dtype))


def mixed() -> list[Gradient]:
    rng = np.random.RandomState(0)
    return [
        gradient(rng.randn(SMALL), "a"),
        gradient(rng.randn(LARGE), "b", ctx=mx.cpu(1)),
        gradient(rng.randn(7, 5), "c", "float16"),
        gradient(rng.randn(200, 150), "d", "float16", mx.cpu(1)),
        gradient(rng.randn(1), "e"),
        Gradient("f", gradient(rng.randn(6, 4)).array.tostype("row_sparse")),
    ]


def test_sums_of_squares_are_fp32_in_order_whatever_dtype_device_and_storage():
    (found,) = fetch(square_sums(mixed()))
    expected = [np.square(g.array.asnumpy().astype(np.float64)).sum() for g in mixed()]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("position", [0, -1])
def test_one_non_finite_element_is_found_wherever_it_is(value, at, position):
    items = mixed()
    array = items[at].array.asnumpy()
    array.reshape(-1)[position] = value
    stype = items[at].array.stype
    changed = mx.nd.array(array, ctx=items[at].array.ctx, dtype=array.dtype)
    items[at] = Gradient(items[at].name, changed.tostype(stype))
    assert [bool(ok) for ok in np.isfinite(fetch(square_sums(items))[0])] == [i != at for i in range(6)]
    assert not np.isfinite(fetch(FiniteSums(items)())[0])[at]
    assert [g.name for g in non_finite(items)] == [items[at].name]
    assert not math.isfinite(norm(items))


def test_more_arrays_than_mxnet_s_kernel_has_room_for_are_checked_in_parts():
    items = [gradient([1.0, 2.0], str(number), "float16") for number in range(1001)]
    assert np.isfinite(fetch(FiniteSums(items)())[0]).all()
    items[700].array[1] = math.inf
    found = np.isfinite(fetch(FiniteSums(items)())[0])
    assert not found[700]
    assert found[:600].all()
    assert found[800:].all()
    assert [g.name for g in non_finite(items)] == ["700"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_finite_elements_whose_squares_overflow_are_no_overflow(size):
    items = [gradient(np.full(size, 1e30)), gradient(np.full(size, -3e38))]
    assert not np.isfinite(fetch(square_sums(items))[0]).any()
    assert non_finite(items) == []
    expected = math.sqrt(size) * math.hypot(1e30, 3e38)
    assert norm(items) == pytest.approx(expected, rel=1e-5)


def test_finite_gradients_of_any_kind_and_size_give_finite_sums():
    items = [
        *mixed(),
        gradient(np.full(4096, 60000.0), dtype="float16"),
        gradient(np.ones(gradients._CHECK_BY_DOT + 1)),
    ]
    assert np.isfinite(fetch(FiniteSums(items)())[0]).all()
    assert fetch(FiniteSums(items)())[0].shape == (8,)


@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_check_finds_every_nan_in_arrays_about_the_size_from_which_each_has_an_operator(at):
    sizes = [gradients._CHECK_BY_DOT - 10 + number for number in range(20)]
    items = [gradient(np.ones(size), str(size)) for size in sizes]
    sums = FiniteSums(items)
    items[at].array[sizes[at] - 1] = math.nan
    assert [bool(ok) for ok in np.isfinite(fetch(sums())[0])] == [number != at for number in range(20)]


def test_sums_are_of_the_values_now_and_serve_only_the_arrays_that_they_were_made_for():
    items = mixed()
    sums = FiniteSums(items)
    before = fetch(sums())[0]
    items[0].array[:] = np.nan
    items[3].array[:] = np.inf
    assert np.isfinite(before).all()
    assert [bool(ok) for ok in np.isfinite(fetch(sums())[0])][::3] == [False, False]
    assert sums.serves([Gradient("other name", g.array) for g in items])
    assert not sums.serves(items[:-1])
    assert not sums.serves([*items[:-1], gradient([1.0])])


def test_float16_squares_are_summed_in_fp32():
    items = [gradient(np.full(4096, 60000.0), dtype="float16"), gradient(np.full(LARGE, 2.0**-14), dtype="float16")]
    assert norm(items) == pytest.approx(math.sqrt(4096 * 60000.0**2 + LARGE * 2.0**-28), rel=1e-3)
    assert non_finite(items) == []


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), min_size=1, max_size=5))
@settings(max_examples=examples(30))
def test_the_norm_equals_that_of_the_flat_vector(lists):
    flat = np.concatenate([np.asarray(v, np.float64) for v in lists])
    assert norm([gradient(v) for v in lists]) == pytest.approx(float(np.linalg.norm(flat)), rel=1e-4, abs=1e-18)


def test_no_gradients_at_all_are_finite_with_norm_zero():
    assert norm([]) == 0
    assert non_finite([]) == []
    assert [values.shape for values in fetch(square_sums([]), square_sums([]))] == [(0,), (0,)]


def test_a_row_sparse_gradient_without_rows_counts_as_zero():
    empty = Gradient("w", mx.nd.sparse.zeros("row_sparse", (5, 3)))
    assert norm([empty, gradient([3.0, 4.0])]) == pytest.approx(5)
    assert non_finite([empty]) == []
    unscale([empty], 0.5)


def test_unscale_multiplies_in_place():
    items = [gradient([2.0, 4.0]), Gradient("s", gradient([[0, 0], [6, 8]]).array.tostype("row_sparse"))]
    unscale(items, 0.5)
    assert items[0].array.asnumpy().tolist() == [1, 2]
    assert items[1].array.asnumpy().tolist() == [[0, 0], [3, 4]]


def test_unscale_refuses_float16_by_name_and_changes_nothing():
    items = [gradient([2.0]), gradient([2.0], "half_weight", "float16")]
    with pytest.raises(ValueError, match=r"half_weight.*float16.*clip_global_norm"):
        unscale(items, 0.5)
    assert items[0].array.asscalar() == 2


def test_one_transfer_whatever_the_number_of_gradients_and_devices(monkeypatch):
    calls = []
    original = mx.nd.NDArray.asnumpy
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", lambda self: calls.append(1) or original(self))
    dense = [g for g in mixed() if g.array.stype == "default"]
    calls.clear()
    fetch(square_sums(dense), square_sums(dense[:1]), square_sums([]))
    assert len(calls) == 1


def test_a_gradient_names_its_device():
    assert str(gradient([1.0], "w", ctx=mx.cpu(1))) == "w on cpu(1)"


def test_is_finite_says_so_of_each_element():
    values = [0.0, -0.0, 1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(is_finite(mx.nd.array(values)).asnumpy(), np.isfinite(np.float32(values)))


def test_what_is_finite_is_known_whatever_was_computed_before():
    """An operator may leave an errno in this thread, as all do with the naive engine, and MXNet's parser reads it."""
    number = ctypes.CDLL(None).__errno_location
    number.restype = ctypes.POINTER(ctypes.c_int)
    array = mx.nd.array([1.0, np.inf])
    is_finite(array).wait_to_read()
    number().contents.value = errno.ERANGE
    assert is_finite(array).asnumpy().tolist() == [1, 0]
