"""Prepared updates and MXNet's own: the same bits, whatever changes between two steps."""

from __future__ import annotations

import copy
from typing import Sequence

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from numpy.random import RandomState

from mxmp.step import prepared_updates, updater
from mxmp.step._mxnet import Prepared

SHAPES = [(3,), (2, 5), (prepared_updates._SMALL,), (prepared_updates._SMALL + 1,), (70, 50), (1,), (300, 300)]
ALL = range(len(SHAPES))
OPTIMIZERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"beta1": 0.8, "epsilon": 1e-6},
    "lamb": {"beta1": 0.8},
    "lamb with bounds": {"lower_bound": 0.5, "upper_bound": 2.0, "bias_correction": False},
}
KINDS = {"adam": mx.optimizer.Adam, "lamb": mx.optimizer.LAMB, "lamb with bounds": mx.optimizer.LAMB}


def optimizer(name: str, **options) -> mx.optimizer.Optimizer:
    kind = KINDS.get(name, mx.optimizer.SGD)
    names = {k: f"p{k}_{'weight' if k % 2 else 'bias'}" for k in range(len(SHAPES))}
    return kind(learning_rate=0.1, param_idx2name=names, **{**OPTIMIZERS[name], **options})


class Run:
    """Weights, or masters, and gradients that stay, as a Trainer's do, and an Updater of them."""

    def __init__(self, kind, name: str, dtype: str = "float32", *, half: Sequence[int] = ()) -> None:
        self.ours, self.optimizer, self.draw = kind is updater.Updater, optimizer(name, wd=1e-2), RandomState(1)
        self.updater, self.half = kind(self.optimizer), half
        draw = RandomState(0)
        self.full = [mx.nd.array(draw.normal(size=shape), dtype=dtype) for shape in SHAPES]
        self.weights = [self.stored(k, full) for k, full in enumerate(self.full)]
        self.grads = [self.stored(k, mx.nd.zeros_like(full)) for k, full in enumerate(self.full)]

    def stored(self, k: int, array: mx.nd.NDArray) -> mx.nd.NDArray:
        return array.astype("float16") if k in self.half else array

    def step(self, indices: Sequence[int] = ALL) -> None:
        for grad in self.grads:
            grad[:] = mx.nd.array(self.draw.normal(size=grad.shape), dtype=grad.dtype)
        if self.ours:
            masters = {k: self.full[k] for k in indices if k in self.half}
            weights = [self.weights[k] for k in indices]
            self.updater(list(indices), [self.grads[k] for k in indices], weights, masters)
            return
        grads = [self.grads[k].astype(self.full[k].dtype, copy=False) for k in indices]
        full = [self.full[k] for k in indices]
        if self.optimizer.aggregate_num:
            self.updater(list(indices), grads, full)
        else:
            for each in zip(indices, grads, full):
                self.updater(*each)
        for k in self.half:
            self.weights[k] = self.full[k].astype("float16")

    def values(self) -> list[np.ndarray]:
        return [array.asnumpy() for array in (*self.full, *self.weights)]


def change_of_states(run: Run) -> None:
    run.updater.set_states(run.updater.get_states())


def new_gradients(run: Run) -> None:
    run.grads = [grad.copy() for grad in run.grads]


def new_weight(run: Run) -> None:
    run.full[3] = run.full[3] * 2
    run.weights[3] = run.stored(3, run.full[3])


def a_part(run: Run) -> None:
    run.step([0, 2, 3])


def rate(run: Run) -> None:
    run.optimizer.set_learning_rate(run.optimizer.learning_rate * 0.3)


def rates_of_some(run: Run) -> None:
    run.optimizer.set_lr_mult({1: 0.5, 4: 0.0})
    run.optimizer.set_wd_mult({2: 3.0})


def rescale(run: Run) -> None:
    run.optimizer.rescale_grad = 1 / 3


def clip(run: Run) -> None:
    run.optimizer.clip_gradient = None if run.optimizer.clip_gradient else 0.2


def schedule(run: Run) -> None:
    run.optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)


def step(run: Run) -> None:
    run.step()


def fewer_at_once(run: Run) -> None:
    if run.optimizer.aggregate_num:
        run.optimizer.aggregate_num = 3
        run.updater.aggregate_updates = True


CHANGES = [step, change_of_states, new_gradients, new_weight, a_part, rate, rates_of_some, rescale, clip, fewer_at_once]


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(st.lists(st.sampled_from(CHANGES), max_size=8), st.booleans(), st.sampled_from([(), ALL, (1, 3, 4)]))
@settings(max_examples=examples(15))
def test_any_changes_between_steps_leave_the_bits_that_mxnet_gives_fp32(name, changes, scheduled, half):
    runs = [Run(kind, name, half=half) for kind in (updater.Updater, mx.optimizer.Updater)]
    for run in runs:
        for change in [*([schedule] if scheduled else []), step, *changes, step, step, step]:
            if change is not rate or not scheduled:
                change(run)
    for ours, plain in zip(*(run.values() for run in runs)):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("half", [(), ALL], ids=["weights", "masters"])
def test_prepared_operators_update_all_weights_that_have_states(name, half, monkeypatch):
    run = Run(updater.Updater, name, half=half)
    run.step()
    own = []
    monkeypatch.setattr(type(run.optimizer), "update_multi_precision", lambda *_: own.append(1))
    run.step()
    run.grads[2] = run.grads[2].copy()
    run.step()
    run.step(ALL[2:])
    assert not own


def test_a_first_step_of_sgd_makes_mxnet_s_states():
    run = Run(updater.Updater, "sgd")
    run.step()
    assert run.updater.states == dict.fromkeys(ALL)


def test_another_dtype_takes_mxnet_s_way():
    runs = [Run(kind, "momentum", "float64") for kind in (updater.Updater, mx.optimizer.Updater)]
    for run in runs:
        for _ in range(4):
            run.step()
    for ours, plain in zip(*(run.values() for run in runs)):
        np.testing.assert_array_equal(ours, plain)


def test_a_copy_of_a_prepared_operator_has_arrays_of_its_own():
    weight, grad = mx.nd.ones(3), mx.nd.ones(3)
    operator = Prepared("sgd_update", [weight, grad], [weight], lr=1.0, wd=0.0)
    held = copy.deepcopy({"weight": weight, "operator": operator})
    held["operator"]()
    assert held["weight"].asnumpy().tolist() == [0.0] * 3
    assert weight.asnumpy().tolist() == [1.0] * 3
