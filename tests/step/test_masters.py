"""FP32 masters under an optimizer: what is updated, what computes, and what a user's own write does."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, contexts, train, two_layers
from kit.pictures import full_weights, tree
from kit.twins import MASTERS, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import LowParameter
from mxmp.step.masters import round_master, take_over
from mxmp.step.updater import Updater


def trainer_of(net, name="sgd", **options):
    options.setdefault("learning_rate", 0.05)
    return mxmp.Trainer(net.collect_params(), name, options, loss_scale=2.0**6)


def test_float16_data_is_the_rounded_master_after_every_step():
    net = two_layers(MASTERS, devices=2)
    trainer = trainer_of(net, momentum=0.9)
    for step in range(5):
        train(net, trainer, [step], devices=2)
        for param in trainer._params:
            assert isinstance(param, LowParameter)
            for master, low in zip(param.masters(), param.list_data()):
                assert master.dtype == np.float32
                assert low.dtype == np.float16
                assert tree(master.astype("float16")) == tree(low)


def test_updates_too_small_for_float16_add_up_in_the_master():
    found = []
    for stored in ("float16", "float32"):
        weight = gluon.Parameter("weight", shape=(1,))
        weight.initialize(mx.init.One())
        master = weight.data()
        low = master.astype(stored)
        mine = {0: master} if stored == "float16" else {}
        updater = Updater(mx.optimizer.create("sgd", learning_rate=2.0**-13))
        for _ in range(4096):
            updater(0, mx.nd.ones(1, dtype=stored), low, mine)
        found.append(float(low.asscalar()))
    assert found == [0.5, 0.5]


def test_states_of_the_optimizer_are_fp32():
    net = two_layers(MASTERS)
    trainer = trainer_of(net, "adam")
    train(net, trainer, range(2))
    for state in trainer._updaters[0].states.values():
        assert [a.dtype for a in state] == [np.float32, np.float32]


@pytest.mark.parametrize("when", ["before the first step", "between steps", "between backward and step"])
def test_a_write_into_float16_data_reaches_the_master_at_the_next_update(when):
    """Weight clipping, moving averages: the value written is the one the update starts from."""
    results = []
    for policy in (MASTERS, CASTS):
        net = two_layers(policy)
        trainer = trainer_of(net)
        value = mx.nd.round(net[0].weight.data().astype("float32") * 4) / 4  # exact in both precisions
        if when != "before the first step":
            train(net, trainer, [0])
        if when == "between backward and step":
            original = trainer.step

            def step(size, net=net, value=value, original=original):
                net[0].weight.data()[:] = value
                original(size)

            trainer.step = step
        else:
            net[0].weight.data()[:] = value
        train(net, trainer, [1])
        results.append(full_weights(trainer)[0])
    assert results[0] == results[1]


def test_elements_that_were_not_written_keep_their_fp32_bits():
    master = mx.nd.array([1 + 2.0**-20, 2 + 2.0**-20, np.nan])
    low = master.astype("float16")
    low[0] = 0.25
    take_over(master, low)
    assert master.asnumpy()[:2].tolist() == [0.25, 2 + 2.0**-20]
    round_master(master, low)
    assert low.asnumpy()[:2].tolist() == [0.25, 2]


def test_a_mixed_net_updates_float16_and_float32_parameters_in_one_step():
    net = two_layers(mxmp.Policy("float16", params="float16", exclude=("*dense1*",)))
    kinds = [p.data().dtype for p in net.collect_params().values()]
    assert set(kinds) == {np.dtype(np.float16).type, np.dtype(np.float32).type}
    trainer = trainer_of(net, momentum=0.9)
    before = full_weights(trainer)
    train(net, trainer, range(3))
    assert trainer.skipped_steps == 0
    assert all(a != b for a, b in zip(before, full_weights(trainer)))


def test_an_overflow_in_the_float16_parameter_of_a_mixed_net_stops_all():
    net = two_layers(mxmp.Policy("float16", params="float16", exclude=("*dense1*",)))
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, loss_scale=2.0**14)
    before = full_weights(trainer)
    x = mx.nd.full((4, 3), 0.1)
    with mx.autograd.record():
        loss = (net(x) * 1000).sum()
    trainer.backward(loss)
    trainer.step(4)
    assert trainer.last_step_skipped
    assert full_weights(trainer) == before


def test_setting_data_sets_the_master_and_the_next_update_starts_there():
    found = []
    for policy in (MASTERS, CASTS):
        net = two_layers(policy)
        trainer = trainer_of(net)
        train(net, trainer, [0])
        net[0].weight.set_data(mx.nd.full((4, 3), 0.1))
        train(net, trainer, [1])
        found.append(full_weights(trainer))
    assert found[0] == found[1]


def test_a_plain_trainer_is_kept_away_from_float16_values():
    net = two_layers()
    gluon.Trainer(net.collect_params(), "sgd")
    mxmp.convert(net, MASTERS)
    with pytest.raises(TypeError, match=r"mxmp\.Trainer"):
        net(mx.nd.zeros((1, 3)))


def trained_masters(optimizer, tmp_path, ones):
    """Masters of a small net on two devices after steps, a write into the weight, a save and a load."""
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=4), nn.Dense(2, in_units=8))
    net.initialize(mx.init.Constant(0.1), ctx=contexts(2))
    mxmp.convert(net, "params=float16")
    trainer = mxmp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
    for when in range(4):
        with autograd.record():
            losses = [net(ones((3, 4), ctx=ctx)).sum() for ctx in contexts(2)]
        trainer.backward(losses)
        trainer.step(8)
        if when == 1:
            for data in net[0].weight.list_data():
                data[:] = data * 2
        elif when == 2:
            net.save_parameters(str(tmp_path / "net.params"))
            net.load_parameters(str(tmp_path / "net.params"), ctx=contexts(2))
    return [master.asnumpy() for param in net.collect_params().values() for master in param.masters()]


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lamb"])
def test_a_net_of_numpy_arrays_has_the_same_masters(optimizer, tmp_path):
    want = trained_masters(optimizer, tmp_path, mx.nd.ones)
    with mx.util.np_shape(True), mx.util.np_array(True):
        got = trained_masters(optimizer, tmp_path, mx.np.ones)
    assert_same(got, want)
