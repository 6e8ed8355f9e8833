"""MXNet's Updater and ours: the same bits."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.twins import assert_same

from mxmp.step import prepared_updates
from mxmp.step import updater as ours

SHAPES = [(3,), (1, ours._LARGE - 1), *[(4, ours._LARGE // 4 + number) for number in range(14)], (5, 7), (64, 64)]


def optimizer(settings: dict) -> mx.optimizer.SGD:
    names = dict(enumerate(f"p{number}_weight" for number in range(len(SHAPES))))
    return mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1 / 3, param_idx2name=names, **settings)


def arrays(seed: int) -> list[mx.nd.NDArray]:
    drawn = np.random.RandomState(seed)
    return [mx.nd.array(drawn.normal(0, 1, shape)) for shape in SHAPES]


def trained(updater: mx.optimizer.Updater, sparse: tuple[int, ...] = ()) -> list[np.ndarray]:
    weights = arrays(0)
    for step in range(1, 5):
        grads = [grad.tostype("row_sparse") if k in sparse else grad for k, grad in enumerate(arrays(step))]
        updater(list(range(len(SHAPES))), grads, weights)
    return [weight.asnumpy() for weight in weights]


def test_adam_s_states_of_large_arrays_begin_apart_and_give_the_same_bits(monkeypatch):
    made_apart: list[tuple[int, int]] = []
    one = ours._zeros_apart

    def noted(weight: mx.nd.NDArray, number: int) -> mx.nd.NDArray:
        made_apart.append((weight.size, number))
        return one(weight, number)

    monkeypatch.setattr(ours, "_zeros_apart", noted)
    options = {"learning_rate": 0.1, "wd": 1e-2}
    made = ours.Updater(mx.optimizer.Adam(**options))
    assert_same(trained(made), trained(mx.optimizer.Updater(mx.optimizer.Adam(**options))))
    large = [size for size in map(np.prod, SHAPES) if size >= ours._LARGE]
    assert sorted(made_apart) == [(size, number) for size in large for number in (1, 2)]


def test_a_sparse_gradient_of_a_large_array_gives_the_same_bits():
    settings = {"momentum": 0.9, "lazy_update": False}
    made = ours.Updater(optimizer(settings))
    plain = mx.optimizer.Updater(optimizer(settings))
    assert_same(trained(made, sparse=(4,)), trained(plain, sparse=(4,)))


def test_numpy_arrays_and_copied_states_give_the_same_bits():
    plain = trained(mx.optimizer.Updater(optimizer({"momentum": 0.9})))
    weights = [weight.as_np_ndarray() for weight in arrays(0)]
    with mx.util.np_array(True):
        made = ours.Updater(optimizer({"momentum": 0.9}))
        for step in range(1, 5):
            made(list(range(len(SHAPES))), [grad.as_np_ndarray() for grad in arrays(step)], weights)
            made.set_states(made.get_states())
    for got, want in zip(weights, plain):
        np.testing.assert_array_equal(got.asnumpy(), want)


@pytest.mark.parametrize("name", ["adam", "nadam", "lamb", "rmsprop"])
def test_masters_that_are_updated_in_parts_get_the_same_bits(name, monkeypatch):
    def masters_and_weights() -> list[np.ndarray]:
        masters, weights = arrays(0), [array.astype("float16") for array in arrays(0)]
        updater = ours.Updater(mx.optimizer.create(name, learning_rate=0.1))
        for step in range(1, 4):
            half = [grad.astype("float16") for grad in arrays(step)]
            updater(list(range(len(SHAPES))), half, weights, dict(enumerate(masters)))
        return [array.asnumpy() for array in (*masters, *weights)]

    want = masters_and_weights()
    monkeypatch.setattr(prepared_updates, "_COPIED", 3 * ours._LARGE)
    assert list(map(len, prepared_updates.parts_of(arrays(0)))) == [3, 2, 2, 2, 2, 2, 2, 3]
    assert_same(masters_and_weights(), want)


def test_sgd_without_momentum_keeps_no_state_of_a_large_array():
    updater, ones = ours.Updater(mx.optimizer.SGD(momentum=0.0)), mx.nd.ones(1 << 16)
    updater(0, ones, ones.copy())
    assert updater.states[0] is None
