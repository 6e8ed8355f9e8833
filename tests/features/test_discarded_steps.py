"""A step that the user leaves out: ``Trainer.discard``, ``zero_grad`` of all parameters, or no step at all."""

from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, forward, two_layers
from kit.twins import MASTERS, array, assert_close, assert_same, convert, seeded, sequence, trainer_of, values
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:this CPU has neither")
POLICIES = {"float16": "float16", "float16 masters": MASTERS, "bfloat16": "bfloat16"}
SGD = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("request_", ["write", "add"])
def test_nothing_is_left_to_step_after_a_discard(request_):
    net = two_layers(CASTS, grad_req=request_)
    trainer = trainer_of("float16", net, scale=128.0, **SGD)
    trainer.discard()  # before any backward
    trainer.backward(forward(net, 0))
    trainer.discard()
    trainer.discard()
    before = values(net)
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        trainer.step(8)
    trainer.step(8, ignore_stale_grad=True)
    assert_same(values(net), before)
    assert all((param.grad().asnumpy() == 0).all() for param in net.collect_params().values())


def test_one_parameter_at_zero_is_no_discard():
    net = two_layers(CASTS)
    trainer = trainer_of("float16", net, scale=128.0, **SGD)
    trainer.backward(forward(net, 0))
    trainer.unscale()
    net[0].weight.zero_grad()
    with pytest.raises(RuntimeError, match=r"step first, then continue, or trainer\.discard\(\)"):
        trainer.backward(forward(net, 1))
    trainer.step(8)


# -- gradients that are used without a step ---------------------------------------------------------


def steep(policy, weights=1.5):
    net = seeded(sequence(nn.Dense(8, in_units=6), nn.Dense(3, in_units=8)), scale=weights)
    convert(policy and POLICIES[policy], net)
    return net


def input_gradients(policy, read, times=20, frozen=False, between=lambda net, trainer: None, weights=1.5):
    net = steep(policy, weights)
    trainer = trainer_of(policy, net, scale="dynamic", **SGD)
    if frozen:
        net.collect_params().setattr("grad_req", "null")
    x = array(0, 4, 6)
    x.attach_grad()
    found = []
    for _ in range(times):
        with autograd.record():
            loss = 300 * net(x).square().sum()
        trainer.backward(loss) if policy else loss.backward()
        found.append(read(x, trainer).asnumpy() if policy else x.grad.asnumpy())
        between(net, trainer)
    return found, trainer


READ = {
    "loss_scale": lambda x, trainer: x.grad / trainer.loss_scale,
    "input_grad": lambda x, trainer: trainer.input_grad(x),
}


@pytest.mark.parametrize(("how", "frozen"), [("loss_scale", False), ("input_grad", False), ("input_grad", True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_s_gradient_that_overflows_is_right_at_a_later_call(policy, how, frozen):
    weights = 0.3 if how == "loss_scale" else 1.5  # with small ones, the gradients of the weights are larger than its
    found, trainer = input_gradients(policy, READ[how], frozen=frozen, weights=weights)
    expected, _ = input_gradients(None, None, times=1, weights=weights)
    assert_close(found[-1:], expected, policy)
    if policy != "bfloat16":
        assert not np.isfinite(found[0]).all()  # otherwise the test shows nothing
        assert trainer.loss_scale < 2.0**16
    assert trainer.skipped_steps == 0


def test_an_overflow_of_an_input_lowers_the_scale_once_a_step(caplog):
    def step(net, trainer):
        before = trainer.loss_scale
        trainer.step(4)
        assert trainer.loss_scale in (before, before / 2)

    with caplog.at_level(logging.WARNING, "mxmp"):
        input_gradients("float16", READ["input_grad"], times=3, between=step)
    assert caplog.text.count("a gradient of an input is not finite at the loss scale") == 3


def test_input_grad_says_what_it_needs():
    net = steep("float16")
    trainer = trainer_of("float16", net)
    for wrong in (array(0, 4, 6), None, 3.0):
        with pytest.raises(ValueError, match=r"x\.attach_grad\(\) before the forward"):
            trainer.input_grad(wrong)


def test_a_parameter_that_was_never_used_has_nothing_to_drop():
    net, unused = two_layers(CASTS), nn.Dense(3)
    unused.initialize()
    trainer = trainer_of("float16", net, unused, scale=mxmp.DynamicLossScaler(128))
    for i in range(2):
        trainer.backward(forward(net, i))
    trainer.discard()


def test_after_discard_a_module_has_the_running_statistics_of_its_forward():
    dense = mx.sym.FullyConnected(mx.sym.BatchNorm(mx.sym.var("data"), name="norm"), num_hidden=3)
    symbol = mx.sym.LinearRegressionOutput(dense, mx.sym.var("label"))
    module = mxmp.Module(symbol, label_names=["label"])
    module.bind([("data", (4, 3))], [("label", (4, 3))])
    module.init_params()
    module.init_optimizer()
    before = module.get_params()[1]["norm_moving_mean"].asnumpy()
    module.forward_backward(mx.io.DataBatch([mx.nd.full((4, 3), 5.0)], [mx.nd.zeros((4, 3))]))
    module.discard()
    assert (module.get_params()[1]["norm_moving_mean"].asnumpy() != before).all()
