"""All devices hold the same weights, bit for bit, with every optimizer, as plain MXNet's do."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import contexts, forward, overflow, train, two_layers
from kit.twins import POLICIES, array, assert_close, assert_same, updates, values
from mxnet import autograd, gluon
from support.optimizers import OPTIMIZERS, options

import mxmp

# A sign, or a division by a tiny gradient's square, turns a rounding into a step of full size.
NORMALIZING = {"adadelta", "adam", "adamax", "ftml", "lamb", "nadam", "rmsprop", "signum"}


class Patient(mx.optimizer.Optimizer):
    """A user's own, which counts and takes smaller steps as it goes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self.calls += 1
        weight -= grad * (self.rescale_grad * self.lr / (1 + 0.1 * self.calls))


class Noisy(Patient):
    """A user's own, which draws."""

    def update(self, index, weight, grad, state):
        weight += mx.nd.random.normal(0, 1e-2, weight.shape, ctx=weight.ctx)
        weight -= grad * (self.rescale_grad * self.lr)


OWN = {"patient": Patient, "noisy": Noisy}


def chosen(name):
    """An optimizer and its options, as Trainers take them."""
    return (OWN[name](learning_rate=0.05), None) if name in OWN else (name, dict(OPTIMIZERS[name]))


def assert_equal_everywhere(net, devices):
    for k in range(1, devices):
        assert_same(values(net, k), values(net))
    for param in net.collect_params().values():
        for copy in param.list_data()[1:]:
            np.testing.assert_array_equal(param.list_data()[0].asnumpy(), copy.asnumpy())


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OWN])
def test_devices_hold_equal_weights_after_every_step(name, policy, devices):
    net = two_layers(POLICIES[policy], devices)
    scaler = mxmp.DynamicLossScaler(1024.0)
    trainer = mxmp.Trainer(net.collect_params(), *chosen(name), loss_scale=scaler)
    start = values(net)
    for i in range(4):
        trainer.backward(forward(net, i, devices))
        if i == 1:
            overflow(trainer, 1, devices - 1)
        trainer.step(4 * devices)
        assert trainer.last_step_skipped == (i == 1)
        assert_equal_everywhere(net, devices)
    assert all((new != old).any() for new, old in zip(values(net), start))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_gives_all_devices_one_rate_where_a_layer_is_left_out(name, policy):
    """The weight with fewer updates stands first, and takes the rate of the step before, as MXNet's does."""
    found = []
    for devices in (1, 2):
        net = two_layers(POLICIES[policy], devices)
        params = [*net.collect_params().values()][::-1]
        trainer = mxmp.Trainer(params, name, options(name, True), loss_scale=64.0)
        for i in range(6):
            with autograd.record():
                low = [net[0](array(i, 4, 3, ctx=ctx)) for ctx in contexts(devices)]
                losses = [(net[1](out) if i % 2 == 0 else out).square().sum() for out in low]
            trainer.backward(losses)
            trainer.step(4 * devices, ignore_stale_grad=True)
            assert_equal_everywhere(net, devices)
        found.append(values(net))
    if name != "sgld":
        assert_close(*found)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "sgld"] + ["patient"])
def test_two_devices_learn_what_plain_mxnet_learns_on_two(name):
    """Plain MXNet updates once, on the kvstore, whatever the number of devices."""
    found = []
    for policy in (None, "float16"):
        net = two_layers(policy, 2)
        if policy is None:
            trainer = gluon.Trainer(net.collect_params(), *chosen(name), update_on_kvstore=True)
        else:
            trainer = mxmp.Trainer(net.collect_params(), *chosen(name), loss_scale=1024.0)
        found.append(updates(net, lambda: train(net, trainer, range(4), 2, 8)))  # noqa: B023
    if name not in NORMALIZING:
        assert_close(found[1], found[0])
        return
    for full, low in zip(*found):
        assert np.median(np.abs(low - full)) <= 0.02 * np.abs(full).max()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_module_s_devices_hold_equal_weights(name, policy):
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=3, no_bias=True, name="fc2")
    symbol = mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax")
    module = mxmp.Module(symbol, context=contexts(2), policy=POLICIES[policy], loss_scale=1024.0)
    module.bind([("data", (8, 6))], [("softmax_label", (8,))])
    start = {"fc1_weight": array(1, 4, 6) * 0.3, "fc2_weight": array(2, 3, 4) * 0.3}
    module.init_params(arg_params=start, aux_params={})
    module.init_optimizer("device", name, dict(OPTIMIZERS[name]))
    for i in range(3):
        module.forward_backward(mx.io.DataBatch([array(i, 8, 6)], [mx.nd.arange(8) % 3]))
        module.update()
        for copies in module._exec_group.param_arrays:
            np.testing.assert_array_equal(copies[0].asnumpy(), copies[1].asnumpy())
    # With unequal masters the average that get_params gives is none of them.
    for name, copies in zip(module._exec_group.param_names, module._exec_group.param_arrays):
        held = module.get_params()[0][name].astype(copies[0].dtype if policy == "float16 masters" else "float32")
        np.testing.assert_array_equal(held.asnumpy(), copies[0].asnumpy())
