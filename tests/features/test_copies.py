"""Copies, pickles and hooks of converted nets and of Trainers: as for plain ones."""

from __future__ import annotations

import copy
import pickle

import mxnet as mx
import numpy as np
import pytest
from kit import twins
from kit.twins import (
    FLAGS,
    array,
    assert_same,
    convert,
    seeded,
    sequence,
    train,
    trainer_of,
    value,
    values,
)
from mxnet.gluon import nn

import mxmp

# None: MXNet's own, the yardstick.
POLICIES = {"plain": None, **twins.POLICIES}
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "pickle, protocol 2": lambda each: pickle.loads(pickle.dumps(each, 2)),
}


def plain():
    layers = nn.Dense(5, in_units=6, activation="tanh"), nn.BatchNorm(in_channels=5), nn.Dense(2, in_units=5)
    return seeded(sequence(*layers))


def converted(policy, called=True, flags=None):
    net = plain()
    convert(POLICIES[policy], net, flags=flags)
    if called:
        net(array(0, 4, 6))
    return net


def trainable(net):
    """MXNet's copies of arrays are in no graph and have no gradients until they are asked for anew."""
    for param in net.collect_params().values():
        request = param.grad_req
        param.grad_req = "null"
        param.grad_req = request
    return net


@pytest.fixture(params=COPIES)
def copied(request):
    return COPIES[request.param]


# MXNet copies no net that is hybridized and was called.
@pytest.mark.parametrize(
    ("flags", "called"), [("not hybridized", False), ("not hybridized", True), ("hybridized", False), ("static", False)]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_converted_net_computes_the_same_and_apart(policy, called, flags, copied):
    net = converted(policy, called, FLAGS[flags])
    other = copied(net)
    x = array(1, 4, 6)
    expected = net(x).asnumpy()
    np.testing.assert_array_equal(other(x).asnumpy(), expected)
    for name, param in other.collect_params().items():
        param.set_data(param.data().astype("float32") * 0 + (1 if name.endswith("var") else 0.5))
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert not np.array_equal(other(x).asnumpy(), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_can_be_restored_and_converted_anew_without_the_original_noticing(policy, copied):
    net = converted(policy)
    if policy == "plain":
        return
    low = net(array(1, 4, 6)).asnumpy()
    other = mxmp.restore(copied(net))
    np.testing.assert_array_equal(other(array(1, 4, 6)).asnumpy(), plain()(array(1, 4, 6)).asnumpy())
    mxmp.convert(other, "bfloat16" if policy == "float16" else "float16")
    other(array(1, 4, 6))
    np.testing.assert_array_equal(net(array(1, 4, 6)).asnumpy(), low)
    assert {str(graph.policy) for graph in mxmp.explain(net).graphs} == {str(mxmp.Policy.parse(str(POLICIES[policy])))}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parameter_can_be_copied(policy, copied):
    net = converted(policy)
    other = copied(net[0].weight)
    np.testing.assert_array_equal(value(other), value(net[0].weight))
    other.set_data(mx.nd.zeros(other.shape))
    assert value(net[0].weight).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_net_and_trainer_goes_on_apart(policy, copied):
    """As a checkpoint of everything, between two steps."""
    net, scaler = converted(policy), mxmp.DynamicLossScaler(256.0)
    trainer = trainer_of(POLICIES[policy], net, scale=scaler, learning_rate=0.1, momentum=0.9)
    train(net, range(3), trainer)
    kept = values(net)
    other, its_trainer = copied((net, trainer))
    trainable(other)
    if policy != "plain":
        assert its_trainer.loss_scale == trainer.loss_scale
    train(other, range(3, 6), its_trainer)
    assert_same(values(net), kept)
    train(net, range(3, 6), trainer)
    assert_same(values(other), values(net))


@pytest.mark.parametrize(
    "made",
    [
        mxmp.Policy("float16", exclude=["*a*"]),
        mxmp.StaticLossScaler(8),
        mxmp.DynamicLossScaler(64.0),
        mxmp.NoLossScaler(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_policies_and_scalers_can_be_copied(made, copied):
    assert repr(copied(made)) == repr(made)


# -- hooks ------------------------------------------------------------------------------------------

KINDS = {"pre": "register_forward_pre_hook", "post": "register_forward_hook"}


def hooked(net, kind, seen):
    return getattr(net, KINDS[kind])(lambda block, *args: seen.append(block.name))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before convert", "after convert"])
@pytest.mark.filterwarnings("ignore:.*is being hybridized while still having forward hook:UserWarning")
def test_a_user_s_hook_fires_also_after_restore_and_can_be_detached(when, kind, restored, child, called):
    net = plain()
    seen = []
    block = net[0] if child else net
    if when == "before convert":
        handle = hooked(block, kind, seen)
    mxmp.convert(net)
    if when == "after convert":
        handle = hooked(block, kind, seen)
    if called:
        block(array(0, 4, 6))
        assert seen == [block.name]
        seen.clear()
    if restored:
        mxmp.restore(net)
    block(array(0, 4, 6))
    assert seen == [block.name]
    handle.detach()
    block(array(0, 4, 6))
    assert seen == [block.name]
    expected = plain() if restored else converted("float16")
    assert np.array_equal(net(array(0, 4, 6)).asnumpy(), expected(array(0, 4, 6)).asnumpy())
