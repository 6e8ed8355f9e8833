"""``grad_req="add"``: gradients of several backwards add up, through everything that mxmp inserts."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.modules import batch, bound, mlp, start
from kit.twins import (
    MASTERS,
    POLICIES,
    SCALE,
    array,
    assert_close,
    convert,
    seeded,
    sequence,
)
from mxnet import autograd
from mxnet.gluon import nn

import mxmp


def net_of():
    return seeded(sequence(nn.Dense(5, in_units=6, activation="tanh"), nn.Dense(2, in_units=5, use_bias=False)))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_an_input_add_up(policy):
    def gradient(policy):
        net = net_of()
        convert(policy, net)
        x = array(0, 4, 6)
        x.attach_grad("add")
        for _ in range(3):
            with autograd.record():
                out = net(x)
                loss = (out * out).sum()
            loss.backward()
        return [x.grad.asnumpy()]

    assert_close(gradient(POLICIES[policy]), gradient(None), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_module_two_backwards_add_up_for_weights_and_inputs(policy):
    def trained(kind, **mixed):
        module = bound(kind(mlp(), **mixed), inputs_need_grad=True, grad_req="add")
        module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.5})
        for i in range(2):
            module.forward_backward(batch(i))
        module.update()
        after = module.get_params()[0]
        learned = [(after[name] - value).asnumpy() for name, value in start().items()]
        return [*learned, module.get_input_grads()[0].asnumpy()]

    found = trained(mxmp.Module, policy=POLICIES[policy], loss_scale=SCALE)
    assert_close(found, trained(mx.mod.Module), policy)


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0**20), (2.0**20, 2.0**-8)])
def test_sums_of_float16_gradients_follow_a_loss_scale_by_any_factor(before, after):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    mxmp.convert(net, MASTERS)
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=before)
    step = trainer.scaled_step
    step.continue_sums([])
    sums = mx.nd.array([2.0**10 if after < before else 2.0**-10], dtype="float16")
    expected = sums.astype("float32") * (after / before)
    step.scaler.loss_scale = after
    step.continue_sums([sums])
    assert sums.asnumpy() == pytest.approx(expected.asnumpy(), rel=1e-3)


def test_the_first_sum_of_float16_gradients_takes_the_default_loss_scale():
    net = nn.Dense(2, in_units=6)
    net.initialize(mx.init.One())
    mxmp.convert(net, MASTERS)
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    assert trainer.loss_scale > 2.0**15
    with autograd.record():
        loss = net(mx.nd.full((1, 6), 1e-3)).sum() * 1e-3
    trainer.backward(loss)
    assert np.isfinite(net.weight.grad().asnumpy()).all()
    trainer.step(1)
    assert not trainer.last_step_skipped


@pytest.mark.parametrize("way", ["scale_loss", "backward"])
@pytest.mark.parametrize("policy", POLICIES)
def test_backwards_within_a_record_add_to_sums_when_the_loss_scale_has_changed(policy, way):
    """As in the loop of a YOLO that calls backward within ``autograd.record()``."""
    net = seeded(nn.Dense(3, in_units=6))
    convert(POLICIES[policy], net)
    net(array(0, 4, 6))
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, loss_scale=SCALE)
    found = []
    for scale in (SCALE, 2 * SCALE):
        trainer.scaler.loss_scale = scale
        with autograd.record():
            loss = net(array(0, 4, 6)).square().mean()
            if way == "backward":
                trainer.backward(loss)
            else:
                with trainer.scale_loss(loss) as scaled:
                    autograd.backward(scaled)
        found.append([param.grad().asnumpy() / scale for param in net.collect_params().values()])
        trainer.step(4)
    for first, second in zip(*found):
        np.testing.assert_allclose(second, 2 * first, rtol=1e-2, atol=1e-4)
