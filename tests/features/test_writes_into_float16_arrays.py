"""What a user writes into a float16 array that computes is noticed at the next step, exactly, and looking is cheap."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import contexts
from kit.twins import MASTERS
from mxnet import autograd
from mxnet.gluon import nn
from support.profile import operators

import mxmp
from mxmp.step.gradients import fetch
from mxmp.step.masters import MasterPair, take_over
from mxmp.step.multi_tensor import distances


def pair(master, low=None, ctx=None) -> MasterPair:
    master = mx.nd.array(np.asarray(master, np.float32), ctx=ctx)
    return MasterPair(master, master.astype("float16") if low is None else mx.nd.array(low, ctx=ctx, dtype="float16"))


def written(*pairs: MasterPair) -> list[bool]:
    return [bool(distance != 0) for distance in fetch(distances(pairs))[0]]


def test_a_master_between_two_float16_numbers_is_no_write():
    rng = np.random.RandomState(0)
    for scale in (1e-9, 1e-6, 1e-3, 1.0, 1e4):
        assert written(pair(rng.randn(5000) * scale)) == [False]


def test_what_is_not_finite_is_looked_at_closely():
    """A master of 1e5 is inf in float16, and no distance tells that from another inf."""
    for value in (np.inf, -np.inf, np.nan, 1e5):
        found = pair([1.0, value, 2.0])
        master = found.master.asnumpy()
        assert written(found) == [True]
        take_over(*found)
        np.testing.assert_array_equal(found.master.asnumpy()[[0, 2]], master[[0, 2]])
        np.testing.assert_array_equal(found.master.asnumpy(), master)


def test_masters_and_arrays_stay_as_they_are_and_each_array_has_its_own_answer():
    rng = np.random.RandomState(0)
    pairs = [pair(rng.randn(1 + i % 7, 2), ctx=mx.cpu(i % 3)) for i in range(200)]
    changed = [i for i in range(200) if i % 11 == 5]
    for i in changed:
        pairs[i].half[:] = pairs[i].half[::-1] + 1
    before = [(master.asnumpy(), low.asnumpy()) for master, low in pairs]
    assert [i for i, found in enumerate(written(*pairs)) if found] == changed
    for (master, low), (old_master, old_low) in zip(pairs, before):
        assert (master.asnumpy() == old_master).all()
        assert (low.asnumpy() == old_low).all()


def test_nothing_exposed_gives_nothing():
    assert written() == []


# -- what looking costs -----------------------------------------------------------------------------

LAYERS = 100


def count_operators(step) -> int:
    return sum(count for count, _ in operators(step).values())


def a_deep_net():
    net = nn.HybridSequential()
    for _ in range(LAYERS):
        net.add(nn.Dense(3, in_units=3, use_bias=False))
    net.initialize()
    mxmp.convert(net, MASTERS)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, loss_scale=1.0)

    def backward():
        with autograd.record():
            loss = net(mx.nd.ones((1, 3))).sum()
        trainer.backward(loss)

    def expose():
        for param in net.collect_params().values():
            param.data()

    return backward, lambda: trainer.step(1), expose


def a_deep_module():
    x = mx.sym.var("data")
    for _ in range(LAYERS):
        x = mx.sym.FullyConnected(x, num_hidden=3, no_bias=True)
    loss = mx.sym.LinearRegressionOutput(x, mx.sym.var("label"), name="out")
    module = mxmp.Module(loss, ["data"], ["label"], policy=MASTERS, context=contexts(2), loss_scale=2.0**6)
    module.bind([("data", (4, 3))], [("label", (4, 3))])
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(kvstore="device", optimizer_params={"learning_rate": 0.05, "momentum": 0.9})
    batch = mx.io.DataBatch([mx.nd.ones((4, 3))], [mx.nd.ones((4, 3))])
    return lambda: module.forward_backward(batch), module.update, lambda: module._exec_group


@pytest.mark.parametrize("make", [a_deep_net, a_deep_module])
def test_a_step_takes_few_operators_more_after_a_user_has_read_all_arrays(make):
    """Of 100 arrays four times two, for each device; one by one they would be 500."""
    backward, step, expose = make()
    for _ in range(2):
        backward()
        step()
    backward()
    before = count_operators(step)
    expose()
    backward()
    assert count_operators(step) <= before + 2 * 10
