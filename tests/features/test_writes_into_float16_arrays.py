"""What a user writes into a float16 array that computes is noticed at the next step, exactly, and looking is cheap."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import contexts, forward, overflow, train, two_layers
from kit.twins import MASTERS, assert_same
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


# -- a user's writes, in training -------------------------------------------------------------------


def last_bit(array):
    values = array.asnumpy()
    values[0, 1] = np.nextafter(values[0, 1], np.float16(10))
    array[:] = mx.nd.array(values, dtype="float16")


def swap(array):
    values = array.asnumpy()
    values[0, 0], values[1, 1] = values[1, 1], values[0, 0]
    array[:] = mx.nd.array(values, dtype="float16")


def keep_the_sum(array):
    array[0, 0] += 0.25
    array[0, 1] -= 0.25


def negate(array):
    array *= -1


def by_an_operator(array):
    mx.nd.sgd_update(array, array, lr=0.5, out=array)


def through_a_view(array):
    array.reshape((-1,))[2:3] = 7


def behind_mxnets_back(array):
    array.wait_to_read()
    mx.nd.from_dlpack(mx.nd.to_dlpack_for_write(array))[0, 2] = 0.125
    mx.nd.waitall()


def set_all(array):
    array[:] = 3


def to_infinity(array):
    array[1, 2] = np.inf


WRITES = [
    set_all,
    last_bit,
    swap,
    keep_the_sum,
    negate,
    by_an_operator,
    through_a_view,
    behind_mxnets_back,
    to_infinity,
]


def module_of(layers=1, size=3):
    x = mx.sym.var("data")
    for _ in range(layers):
        x = mx.sym.FullyConnected(x, num_hidden=size, no_bias=True)
    loss = mx.sym.LinearRegressionOutput(x, mx.sym.var("label"), name="out")
    module = mxmp.Module(loss, ["data"], ["label"], policy=MASTERS, context=contexts(2), loss_scale=2.0**6)
    module.bind([("data", (4, size))], [("label", (4, size))])
    mx.random.seed(0)
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(kvstore="device", optimizer_params={"learning_rate": 0.05, "momentum": 0.9})
    return module


def train_module(module, size=3):
    rng = np.random.RandomState(0)
    batch = mx.io.DataBatch([mx.nd.array(rng.randn(4, size))], [mx.nd.array(rng.randn(4, size))])
    module.forward_backward(batch)
    module.update()


def trained(frontend, write, device, at_once):
    """Masters of a small net on two devices that was written into; ``at_once``: and asked for its masters then."""
    if frontend == "gluon":
        net = two_layers(MASTERS, devices=2)
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, loss_scale=2.0**6)
        array, step = net[0].weight.data(mx.cpu(device)), lambda i: train(net, trainer, [i], devices=2)
        masters = lambda: [param.masters() for param in trainer._params]  # noqa: E731
    else:
        module = module_of()
        array, step = module._exec_group.param_arrays[0][device], lambda i: train_module(module)
        masters = lambda: [weight.masters for weight in module.core.weights(module.arrays())]  # noqa: E731
    step(0)
    write(array)
    if at_once:
        masters()
    for i in range(1, 3):
        step(i)
    return [master.asnumpy() for copies in masters() for master in copies]


@pytest.mark.parametrize("frontend", ["gluon", "symbolic"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_the_next_update_starts_from_what_was_written(write, device, frontend):
    """As where the masters are read right after the write, which compares each array with its master by itself."""
    found, want, without = (
        trained(frontend, how, device, at_once)
        for how, at_once in ((write, False), (write, True), (lambda array: None, False))
    )
    assert_same(found, want)
    assert any((mine != other).any() for mine, other in zip(found, without))


def test_a_write_before_an_overflow_waits_for_the_next_clean_step():
    net = two_layers(MASTERS)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, loss_scale=2.0**6)
    weight = net[0].weight
    before = weight._masters[0].asnumpy()
    weight.data()[:] = 0.5
    losses = forward(net, 0)
    trainer.backward(losses)
    overflow(trainer)
    trainer.step(4)
    assert trainer.last_step_skipped
    assert (weight._masters[0].asnumpy() == before).all()
    train(net, trainer, [1])
    assert abs(weight._masters[0].asnumpy() - 0.5).max() < 0.1


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
    module = module_of(LAYERS)
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
