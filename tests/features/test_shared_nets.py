"""Two nets with one trunk: right numbers and masters kept, whatever is converted or restored, or a refusal."""

from __future__ import annotations

import gc
import weakref

import mxnet as mx
import numpy as np
import pytest
from kit.twins import (
    MASTERS,
    POLICIES,
    array,
    assert_close,
    assert_same,
    equal_or_refused,
    loss_of,
    seeded,
    sequence,
    step,
    trainer_of,
    updates,
    value,
)
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import conversions_of

SHARED = r"shar"


def pair(kind):
    """Two nets that share their trunk: the same block, or another block with the same parameters."""

    def two(name, shared=(None, None)):
        first = nn.Dense(5, in_units=6, activation="tanh", prefix=f"{name}_first_", params=shared[0])
        return sequence(first, nn.Dense(4, in_units=5, prefix=f"{name}_last_", params=shared[1]), prefix=f"{name}_")

    trunk = two("trunk")
    other = trunk if kind == "block" else two("other", [layer.params for layer in trunk])
    nets = [sequence(own, nn.Dense(2, in_units=4), prefix=f"net{i}_") for i, own in enumerate((trunk, other))]
    seeded(nets[0], seed=3)
    seeded(nets[1][1], seed=4)
    return nets


def parameters(nets):
    found = {}
    for net in nets:
        found.update({id(p): p for p in net.collect_params().values()})
    return list(found.values())


def train(nets, policy, order=(0, 1, 1, 0)):
    """Updates of every parameter of both nets: a backward and a step through each net by turns."""
    trainer = trainer_of(policy, *nets)

    def steps():
        for i in order:
            step(trainer, loss_of(nets[i], seed=i), ignore_stale_grad=True)

    return updates(dict(enumerate(parameters(nets))), steps)


def outputs(nets):
    return [net(array(9, 4, 6)).asnumpy() for net in nets]


@pytest.fixture(params=["block", "parameters"])
def kind(request):
    return request.param


MIXED = {
    "float16, bfloat16": ("float16", "bfloat16"),
    "bfloat16, float16": ("bfloat16", "float16"),
    "masters, bfloat16": (MASTERS, "bfloat16"),
    "bfloat16, masters": ("bfloat16", MASTERS),
    "masters, casts": (MASTERS, "float16"),
    "casts, masters": ("float16", MASTERS),
    "masters, excluded": (MASTERS, mxmp.Policy("float16", params="float16", exclude=["*trunk*", "*other*"])),
}


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("policies", MIXED)
def test_different_policies(kind, policies, called):
    def run():
        nets = pair(kind)
        for net, policy in zip(nets, MIXED[policies]):
            mxmp.convert(net, policy)
            if called:
                net(array(0, 1, 6))
        found = train(nets, "bfloat16")
        # Each net still computes what its own policy says, whatever was converted after it.
        for i, policy in enumerate(MIXED[policies]):
            alone = pair(kind)[i]
            for mine, theirs in zip(alone.collect_params().values(), nets[i].collect_params().values()):
                mine.set_data(mx.nd.array(value(theirs)))
            ours, theirs = outputs([nets[i]])[0], outputs([mxmp.convert(alone, policy)])[0]
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-3 * np.abs(theirs).max())
        return found

    expected = train(pair(kind), None)
    equal_or_refused(run, lambda found: assert_close(found, expected, "bfloat16"), saying=SHARED)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_restore_of_one_leaves_the_other_right_and_the_masters_alive(kind, policy, first):
    def run():
        nets = pair(kind)
        for net in nets:
            mxmp.convert(net, POLICIES[policy])
        low = outputs(nets)
        full = [value(p) for p in parameters(nets)]
        mxmp.restore(nets[first])
        for p, old in zip(parameters(nets), full):
            np.testing.assert_array_equal(value(p), old, err_msg=p.name)
        np.testing.assert_array_equal(outputs(nets)[1 - first], low[1 - first])
        return train(nets, policy)

    expected = train(pair(kind), None)
    equal_or_refused(run, lambda found: assert_close(found, expected, policy), saying=SHARED)


@pytest.mark.parametrize("policy", POLICIES)
def test_restore_of_both_gives_fp32(kind, policy):
    nets = pair(kind)
    try:
        for net in nets:
            mxmp.convert(net, POLICIES[policy])
        outputs(nets)
    except ValueError as refused:
        pytest.skip(f"refused: {refused}")
    for net in nets:
        mxmp.restore(net)
    assert_same(outputs(nets), outputs(pair(kind)))
    assert all(type(p) is gluon.Parameter for p in parameters(nets))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deleted_net_keeps_neither_its_conversion_nor_the_parameters_that_it_shared_in_float16(policy):
    nets = pair("parameters")  # MXNet itself keeps a net alive whose blocks another one contains
    for net in nets:
        mxmp.convert(net, POLICIES[policy])
        net(array(9, 4, 6))
    ended = [weakref.ref(conversion) for conversion in conversions_of(nets[1].collect_params().values())]
    del net, nets[1]
    mxmp.restore(nets[0])
    np.testing.assert_array_equal(nets[0](array(9, 4, 6)).asnumpy(), pair("parameters")[0](array(9, 4, 6)).asnumpy())
    assert all(type(p) is gluon.Parameter for p in parameters(nets))
    gc.collect()
    assert [conversion() for conversion in ended] == [None] * len(ended)


@pytest.mark.parametrize("policies", ["float16, bfloat16", "bfloat16, float16"])
def test_explain_shows_what_runs(kind, policies):
    def run():
        nets = pair(kind)
        for net, policy in zip(nets, MIXED[policies]):
            mxmp.convert(net, policy)
        outputs(nets)
        return nets

    def check(nets):
        for net, policy in zip(nets, MIXED[policies]):
            report = mxmp.explain(net)
            whole = [graph for graph in report.graphs if graph.name == net.name]
            assert [str(graph.policy) for graph in whole] == [str(mxmp.Policy(policy))]
            assert {node.dtype for node in whole[0].nodes if node.op == "FullyConnected"} == {policy}

    equal_or_refused(run, check, saying=SHARED)


def test_a_trainer_of_one_net_does_not_lose_the_masters_when_the_other_is_restored(kind):
    def run():
        nets = pair(kind)
        for net in nets:
            mxmp.convert(net, MASTERS)
            net(array(0, 1, 6))
        trainer = trainer_of("float16", nets[0], scale=256.0, learning_rate=1e-5)
        step(trainer, loss_of(nets[0]), 1)
        mxmp.restore(nets[1])
        return updates(nets[0], lambda: [step(trainer, loss_of(nets[0]), 1) for _ in range(3)])

    def check(found):
        for delta in found:  # updates this small exist in a master only
            assert (delta != 0).all()

    equal_or_refused(run, check, saying=SHARED)
