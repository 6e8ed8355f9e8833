"""The cases of PyTorch's GradScaler tests and of Apex's amp tests, against plain FP32 MXNet that leaves steps out.

As there, an inf or NaN is put into the gradients of one step, which the plain run leaves out: afterwards both have
learned the same. (Arguments of scalers, and states that are no states: ``tests/step/test_scaler.py``.)
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit import twins
from kit.twins import (
    LOSS,
    POLICIES,
    array,
    assert_close,
    assert_same,
    backward,
    convert,
    seeded,
    sequence,
    updates,
    values,
)
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

STEPS, SKIPPED, BATCH = 7, 2, 8
SGD = {"learning_rate": 0.05, "momentum": 0.9}


def scaler(**kwargs):
    return mxmp.DynamicLossScaler(**{"init_scale": 128, "growth_interval": 2, "growth_factor": 2, **kwargs})


def made(policy, grad_req="write"):
    net = seeded(sequence(nn.Dense(8, in_units=6, activation="tanh"), nn.Dense(4, in_units=8)))
    net.collect_params().setattr("grad_req", grad_req)
    convert(policy and POLICIES[policy], net)
    net(array(0, 1, 6))
    return net


def trainer_of(net, policy, loss_scale=None):
    return twins.trainer_of(policy, net, scale=loss_scale or scaler(), **SGD)


def recorded(net, step):
    with autograd.record():
        return LOSS(net(array(step, BATCH, 6)), array(100 + step, BATCH, 4))


def gradients(net):
    return [param.grad() for param in net.collect_params().values()]


def spoil(net, value=np.inf, number=0):
    """One element of one parameter's gradient."""
    gradient = gradients(net)[number]
    flat = gradient.reshape((-1,))
    flat[flat.size - 1] = value


# -- what happens between backward and step ---------------------------------------------------------


# Trainer.unscale refuses float16 gradients, which could not hold the result.


# -- unscale and states -----------------------------------------------------------------------------


def test_a_second_unscale_is_refused_and_changes_nothing():
    net = made("float16")
    trainer = trainer_of(net, "float16")
    backward(trainer, recorded(net, 0))
    trainer.unscale()
    before = [gradient.asnumpy() for gradient in gradients(net)]
    with pytest.raises(RuntimeError, match="already called since the last step"):
        trainer.unscale()
    for old, new in zip(before, gradients(net)):
        np.testing.assert_array_equal(old, new.asnumpy())
    trainer.step(BATCH)
    backward(trainer, recorded(net, 1))
    trainer.unscale()  # once a step
    assert not trainer.last_step_skipped


@pytest.mark.parametrize("reduced", ["by step", "before unscale", "after unscale"])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_a_change_of_unscaled_gradients_hides_no_overflow(bad, reduced):
    """Clipping to a range makes finite numbers of infinities, and zeroing one of a NaN."""
    net = made("float16")
    trainer = trainer_of(net, "float16")
    before = values(net)
    backward(trainer, recorded(net, 0))
    if bad is not None:
        spoil(net, bad, number=1)
    if reduced == "before unscale":
        trainer.allreduce_grads()
    trainer.unscale()
    for gradient in gradients(net):
        gradient[:] = mx.nd.where(gradient == gradient, gradient, mx.nd.zeros_like(gradient)).clip(-1, 1)
    if reduced == "after unscale":
        trainer.allreduce_grads()
    (trainer.step if reduced == "by step" else trainer.update)(BATCH)
    assert trainer.last_step_skipped == (bad is not None)
    assert len(trainer.overflow_params) == (bad is not None)
    assert all(map(np.array_equal, before, values(net))) == (bad is not None)


def test_gradients_that_are_all_zero_are_a_clean_step():
    net = made("float16")
    trainer = trainer_of(net, "float16", scaler(growth_interval=1))
    with autograd.record():
        loss = LOSS(net(array(0, BATCH, 6)), array(100, BATCH, 4)) * 0
    backward(trainer, loss)
    before = values(net)
    trainer.step(BATCH)
    assert not trainer.last_step_skipped
    assert trainer.loss_scale == 256
    assert_same(values(net), before)


def test_gradients_that_only_the_scale_saves_from_zero_are_learned():
    """Of a loss times 1e-7, of which float16 without a scale keeps the largest, to one bit."""

    def run(policy, loss_scale=None):
        net = made(policy)
        trainer = twins.trainer_of(policy, net, scale=loss_scale, **{**SGD, "learning_rate": 5e5})

        def steps():
            for step in range(3):
                with autograd.record():
                    loss = LOSS(net(array(step, BATCH, 6)), array(100 + step, BATCH, 4)) * 1e-7
                backward(trainer, loss)
                trainer.step(BATCH)

        return updates(net, steps)

    full = run(None)
    assert_close(run("float16", 2.0**16), full)
    lost = run("float16", 1.0)
    assert all(np.abs(a - b).max() > 0.3 * np.abs(b).max() for a, b in zip(lost, full))
