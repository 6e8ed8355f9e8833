"""blame names the operator whose exclusion cures, by trying it; guard moves it; a skip says if the loss is at fault."""

from __future__ import annotations

import logging
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.plants.kinds import PLANTED, plan_of, planted
from support.plants.programs import BROKEN, SPOILED, VANISHING

import mxmp
from mxmp.diagnose import blame, guard
from mxmp.diagnose.networks.of_gluon.training import exclude_operators
from mxmp.diagnose.networks.of_symbolic import training as of_symbolic
from mxmp.precision.plan import Decision

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def trained(plant, dtype="float16", **options):
    """The net of a plant with its plan, its trainer and its inputs."""
    net, inputs, _ = planted(plant)
    mxmp.convert(net, plan_of(net, inputs, dtype))
    return net, mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-6}, **options), inputs


def step(net, trainer, inputs, loss=lambda out: out.mean()):
    with autograd.record():
        value = loss(net(*inputs))
    trainer.backward(value)
    trainer.step(1)
    return value


def test_there_are_twenty_plants():
    assert len(SPOILED) >= 20
    assert len(VANISHING) >= 10


def check_cure(plant, dtype="float16", scale=1.0):
    net, trainer, inputs = trained(plant, dtype)
    found = blame(net, trainer, *inputs, loss=lambda out: out.mean())
    assert found.reproduced
    assert found.cure
    assert f"exclude={[*found.cure]} cures it" in found.cause
    again, inputs, _ = planted(plant)
    plan = plan_of(again, inputs, dtype)
    low = mxmp.Plan.from_json(plan.to_json())
    mxmp.convert(again, low)
    exclude_operators(again, found.cure)
    trainer = mxmp.Trainer(again.collect_params(), "sgd", loss_scale=scale)
    assert not blame(again, trainer, *inputs, loss=lambda out: out.mean()).reproduced
    return found


@pytest.mark.parametrize("name", ["log of a product", "log of a dot"])
def test_the_operator_that_cures_is_named(name):
    assert PLANTED in check_cure(next(plant for plant in SPOILED if plant.name == name)).cure


@pytest.mark.parametrize("plant", SPOILED, ids=lambda plant: plant.name)
@pytest.mark.slow
def test_the_operator_that_cures_is_named_for_each_plant(plant):
    check_cure(plant)


def module_of(plant, dtype="float16", **options):
    """A Module of the symbol of a plant, with its plan and its weights, and its batch."""
    net, inputs, _ = planted(plant)
    plan = plan_of(net, inputs, dtype)
    full = {name: Decision(op, False, "planted") for name, op in (("mean", "mean"), ("loss", "MakeLoss"))}
    plan = replace(plan, decisions={**plan.decisions, **full})
    names = [f"input{i}" for i in range(len(inputs))]
    with mx.name.NameManager():
        symbol = mx.sym.MakeLoss(mx.sym.mean(net(*map(mx.sym.var, names)), name="mean"), name="loss")
    module = mxmp.Module(symbol, names, None, policy=plan, **options)
    module.bind([(name, each.shape) for name, each in zip(names, inputs)])
    params = {name: each.data() for name, each in net.collect_params().items()}
    module.init_params(arg_params={name: each for name, each in params.items() if name in symbol.list_arguments()})
    module.init_optimizer(optimizer_params={"learning_rate": 1e-6})
    return module, mx.io.DataBatch(inputs)


BY_DTYPE = [pytest.param(plant, dtype, id=f"{plant.name}, {dtype}") for plant in BROKEN for dtype in plant.dtypes]
OF_MODULES = [*BY_DTYPE, *(pytest.param(plant, "float16", id=plant.name) for plant in SPOILED)]


@pytest.mark.parametrize(("plant", "dtype"), BY_DTYPE)
@pytest.mark.slow
def test_the_operator_that_takes_digits_is_named_for_each_plant(plant, dtype):
    found = check_cure(plant, dtype, 2.0**-14)  # at which no gradient overflows
    assert all(plant.where in name for name in found.cure)


@pytest.mark.parametrize(("plant", "dtype"), OF_MODULES)
@pytest.mark.slow
def test_of_a_module_the_operator_that_cures_is_named_for_each_plant(plant, dtype):
    module, batch = module_of(plant, dtype)
    found = blame(module, batch, loss_scale=1)
    assert found.reproduced
    assert found.cure
    assert f"exclude={[*found.cure]} cures it" in found.cause
    module, batch = module_of(plant, dtype)
    of_symbolic.exclude_operators(module, module, found.cure)
    assert not blame(module, batch, loss_scale=2.0**-14).reproduced  # no gradient overflows at this one


def test_of_a_module_the_loss_may_be_one_number():
    scores = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc") * 1e6
    module = mxmp.Module(mx.sym.MakeLoss(mx.sym.mean(scores), name="loss"), label_names=None, policy="float16")
    module.bind([("data", (4, 5))])
    module.init_params(mx.init.One())
    module.init_optimizer()
    found = blame(module, mx.io.DataBatch([mx.nd.ones((4, 5))]), loss_scale=2.0**16)
    assert (found.where, found.dtype) == ("backward", "float16")
    assert "A lower loss scale avoids it" in found.cause


SCALE = 2.0**-6  # at which no gradient of the plants overflows in FP32's place


def guarded_gluon(plant):
    net, trainer, inputs = trained(plant, loss_scale=SCALE)
    with guard(net, trainer) as guarded:
        for _ in range(16):
            step(net, trainer, inputs)
    return guarded, trainer


def guarded_module(plant):
    module, batch = module_of(plant, loss_scale=SCALE)
    with guard(module) as guarded:
        for _ in range(16):
            module.forward_backward(batch)
            module.update()
    return guarded, module


@pytest.mark.parametrize("guarded_by", [guarded_gluon, guarded_module])
@pytest.mark.parametrize("plant", BROKEN, ids=lambda plant: plant.name)
@pytest.mark.slow
def test_guard_moves_what_takes_digits(plant, guarded_by):
    guarded, step = guarded_by(plant)
    assert all(any(plant.where in name for name in moved.operators) for moved in guarded.moved[:1])
    assert 3 <= step.skipped_steps < 16
    assert not step.last_step_skipped


@pytest.mark.parametrize("name", ["log of a product", "log of a dot", "log of a dense layer"])
def test_guard_moves_what_vanishes_in_front_of_a_logarithm(name):
    net, trainer, inputs = trained(next(plant for plant in SPOILED if plant.name == name))
    with guard(net, trainer) as guarded:
        skipped = []
        for _ in range(16):
            step(net, trainer, inputs)
            skipped.append(trainer.last_step_skipped)
    assert any(PLANTED in moved.operators for moved in guarded.moved)
    assert skipped[0]
    assert not any(skipped[guarded.moved[-1].step + 4 :])


def dense(*layers, weight=0.3):
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(32, activation="relu", in_units=5), *layers)
        net.add(nn.Dense(3, in_units=32, weight_initializer=mx.init.Normal(weight)))
    net.initialize(mx.init.Xavier())
    return net


@pytest.mark.parametrize("big", [1e5, 70000.0])
def test_an_input_above_65504_is_the_input_with_its_value(big):
    net = mxmp.convert(dense(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=128)
    x = mx.nd.random.normal(shape=(4, 5))
    x[0, 0] = big
    found = blame(net, trainer, x, loss=lambda out: LOSS(out, mx.nd.arange(4) % 3))
    assert (found.where, found.name, found.op, found.dtype) == ("input", "the input", "", "float16")
    assert f"{big:.4g} is rounded to float16, which ends at 65504" in found.cause
    assert found.cure == ("net_dense0_fwd",)


def test_a_module_names_its_input_above_65504():
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    module = mxmp.Module(mx.sym.SoftmaxOutput(data, name="softmax"), policy="float16")
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    x = np.ones((4, 5))
    x[0, 0] = 1e5
    found = blame(module, mx.io.DataBatch([mx.nd.array(x)], [mx.nd.zeros(4)]))
    assert (found.where, found.name) == ("input", "data")
    assert found.cure == ("fc",)


def test_a_loss_that_fp32_does_not_have_either_has_no_cure():
    net = mxmp.convert(dense(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=8)
    found = blame(net, trainer, mx.nd.ones((4, 5)), loss=lambda out: (out * 0).log())
    assert not found.cure
    assert "not finite in FP32 either" in found.cause


def test_where_a_lower_scale_avoids_it_no_exclude_is_named():
    net = mxmp.convert(dense(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=2.0**24)
    found = blame(net, trainer, mx.nd.ones((4, 5)), loss=lambda out: LOSS(out, mx.nd.arange(4) % 3) * 100)
    assert "A lower loss scale avoids it" in found.cause
    assert not found.cure


@pytest.mark.parametrize("accumulated", [False, True])
def test_the_first_skip_says_that_the_loss_itself_is_not_finite(accumulated, caplog):
    net = mxmp.convert(dense(weight=1e6), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=mxmp.DynamicLossScaler(2, min_scale=1))
    if accumulated:
        net.collect_params().setattr("grad_req", "add")
    inputs = [mx.nd.ones((4, 5))]
    with caplog.at_level(logging.WARNING, "mxmp"):
        step(net, trainer, inputs, lambda out: LOSS(out, mx.nd.arange(4) % 3))
    assert "the loss or an output is inf or NaN already: see mxmp.diagnose.blame" in caplog.text

    def goes_on():
        for _ in range(6):
            step(net, trainer, inputs, lambda out: LOSS(out, mx.nd.arange(4) % 3))

    with pytest.raises(FloatingPointError, match=r"no loss scale cures: .*blame .* the exclude that cures") as error:
        goes_on()
    assert "scaling is not the cause" not in str(error.value)


def test_a_skip_of_a_finite_loss_says_nothing_of_it(caplog):
    net = mxmp.convert(dense(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=mxmp.DynamicLossScaler(2.0**24))
    with caplog.at_level(logging.INFO, "mxmp"):
        step(net, trainer, [mx.nd.ones((4, 5))], lambda out: LOSS(out, mx.nd.arange(4) % 3) * 1000)
    assert "skipped" in caplog.text
    assert "already" not in caplog.text


def test_a_module_says_of_a_skip_that_an_output_is_not_finite(caplog):
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    module = mxmp.Module(mx.sym.SoftmaxOutput(data, name="softmax"), policy="float16")
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    module.init_params(mx.init.Normal(1e6))
    module.init_optimizer()
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 5))], [mx.nd.zeros(4)]))
    with caplog.at_level(logging.WARNING, "mxmp"):
        module.update()
    assert "the loss or an output is inf or NaN already" in caplog.text


def test_of_a_module_the_operator_that_cures_is_named_and_moved():
    scores = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc") * 60)
    mixed = mx.sym.dot(scores, mx.sym.eye(4), name="mixed")
    module = mxmp.Module(mx.sym.MakeLoss(-mx.sym.log(mixed + 1e-30), name="loss"), label_names=None, policy="float16")
    if not module_is_low(module):
        pytest.skip("the rules keep the product in FP32")
    module.init_optimizer(optimizer_params={"learning_rate": 1e-6})
    batch = mx.io.DataBatch([mx.nd.random.normal(shape=(16, 8))])
    found = blame(module, batch, loss_scale=1)
    assert found.cure == ("mixed",)
    with guard(module) as guarded:
        for _ in range(12):
            module.forward_backward(batch)
            module.update()
    assert "mixed" in guarded.moved[0].operators


def module_is_low(module):
    mx.random.seed(2)
    module.bind([("data", (16, 8))])
    module.init_params(mx.init.Xavier(magnitude=3))
    return module.plan.decisions["mixed"].low
