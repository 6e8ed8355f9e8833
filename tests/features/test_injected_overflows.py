"""The injection matrix: after one non-finite element anywhere, the step changes nothing at all.

NaN, +inf and -inf x each parameter x each device x first and last element x every optimizer x kvstore
None, local, device x accumulation on and off x FP32 parameters and float16 ones with masters. The
distributed kvstore has its own test.
"""

from __future__ import annotations

import math
from itertools import product

import mxnet as mx
import numpy as np
import pytest
from kit.nets import batch, contexts, two_layers
from kit.pictures import picture
from kit.twins import LOSS, MASTERS
from mxnet import autograd
from support.optimizers import OPTIMIZERS, options

import mxmp

pytestmark = pytest.mark.slow

VALUES = (math.nan, math.inf, -math.inf)
POSITIONS = (0, -1)
PARAMETERS = 2
STORES = {"none": (None, 1), "none-2": (None, 2), "local-2": ("local", 2), "device-2": ("device", 2)}
STORED = {"float32": None, "float16": MASTERS}
REQUESTS = ("write", "add")
CASES = (
    sum(PARAMETERS * devices * len(POSITIONS) * len(VALUES) for _, devices in STORES.values())
    * len(OPTIMIZERS)
    * len(STORED)
    * len(REQUESTS)
)


def test_the_matrix_has_6384_cases():
    assert CASES == 6384


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_bit_changes_after_a_non_finite_element(name, store, request_, stored):
    kvstore, devices = STORES[store]
    net = two_layers(STORED[stored], devices, request_)
    # Never at the floor and never backing off, so that every case meets the same scale.
    scaler = mxmp.DynamicLossScaler(init_scale=2.0**6, hysteresis=10**6)
    trainer = mxmp.Trainer(net.collect_params(), name, options(name, True), kvstore=kvstore, loss_scale=scaler)
    with autograd.record():
        losses = [LOSS(net(x), y) for x, y in (batch(i, ctx) for i, ctx in enumerate(contexts(devices)))]

    def backward():
        if request_ == "add":
            net.collect_params().zero_grad()
            trainer.backward(losses, retain_graph=True)
        trainer.backward(losses, retain_graph=True)

    for _ in range(3):
        backward()
        trainer.step(4 * devices)
    assert trainer.skipped_steps == 0
    before = picture(trainer)
    cases = 0
    for param, device, position, value in product(trainer._params, range(devices), POSITIONS, VALUES):
        backward()
        grad = param.list_grad()[device]
        index = np.unravel_index(position % grad.size, grad.shape)
        grad[tuple(int(i) for i in index)] = value
        trainer.step(4 * devices)
        cases += 1
        assert trainer.last_step_skipped
        assert trainer.skipped_steps == cases
        at_fault = {f"{param.name} on {ctx}" for ctx in (contexts(devices) if kvstore else [mx.cpu(device)])}
        assert set(trainer.overflow_params) == at_fault
        assert picture(trainer) == before
    assert cases == PARAMETERS * devices * len(POSITIONS) * len(VALUES)
    backward()
    trainer.step(4 * devices)
    assert not trainer.last_step_skipped
    assert picture(trainer)["weights"] != before["weights"]
