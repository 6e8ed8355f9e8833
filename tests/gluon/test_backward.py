"""Calls that ``gluon.Trainer`` and ``loss.backward`` know: head gradients, arrays as numbers, trainers not reached."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import mxnet as mx
import numpy as np
import pytest
from kit.twins import array, assert_close, backward, convert, seeded, sequence, trainer_of, updates, values
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:this CPU has neither")
POLICIES = ["float16", "bfloat16"]


def made(policy, units=3, seed=1):
    net = seeded(nn.Dense(units, in_units=6), seed=seed)
    convert(policy, net)
    return net


# -- numbers ----------------------------------------------------------------------------------------

NUMBERS = {
    "int": 4,
    "float": 4.0,
    "Fraction": Fraction(4),
    "numpy float32": np.float32(4),
    "numpy int64": np.int64(4),
    "numpy 0-d": np.array(4),
    "numpy of one": np.array([4.0]),
    "numpy of one by one": np.array([[4.0]], "float32"),
    "nd of one": mx.nd.array([4.0]),
    "nd of one int32": mx.nd.array([4], dtype="int32"),
    "np 0-d": lambda: mx.np.array(4.0),
    "np of one": lambda: mx.np.array([4.0]),
}


def number(kind):
    made_ = NUMBERS[kind]
    if not callable(made_):
        return made_
    with mx.util.np_shape(True), mx.util.np_array(True):
        return made_()


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_in_an_array_is_that_number(policy, kind):
    def learned(value):
        net = made(policy)
        trainer = trainer_of(policy, net)

        def steps():
            for call in ("step", "update"):
                with autograd.record():
                    loss = net(array(0, 4, 6)).square()
                trainer.backward(loss)
                trainer.clip_global_norm(value)
                getattr(trainer, call)(value)

        return updates(net, steps)

    for found, expected in zip(learned(number(kind)), learned(4)):
        np.testing.assert_array_equal(found, expected)


NO_NUMBERS = [np.array([4, 4]), np.array(True), np.array("4"), mx.nd.array([0.0]), np.array([])]


@pytest.mark.parametrize("bad", [*NO_NUMBERS, 0, -4, True, math.nan, "1", None])
def test_nothing_else_is_a_positive_number_and_nothing_has_changed(bad):
    net = made("float16")
    trainer = trainer_of("float16", net)
    with autograd.record():
        loss = net(array(0, 4, 6)).square()
    trainer.backward(loss)
    for call, name in ((trainer.step, "batch_size"), (trainer.clip_global_norm, "max_norm")):
        with pytest.raises(ValueError, match=f"{name} must be a positive number"):
            call(bad)
    trainer.step(4)


# -- head gradients ---------------------------------------------------------------------------------


def gradients(policy, call, count=1):
    net = seeded(sequence(nn.Dense(8, in_units=6), nn.Dropout(0.5), nn.Dense(3, in_units=8)))
    convert(policy, net)
    trainer = trainer_of(policy, net, scale=1024.0)
    with autograd.record(train_mode=False):
        losses = [net(array(i, 4, 6)).square() for i in range(count)]
    call(trainer, losses)
    scale = 1024.0 if policy else 1.0
    return [param.grad().asnumpy() / scale for param in net.collect_params().values()]


HEAD = array(9, 4, 3)
# Of our Trainer, and of autograd.
CALLS = {
    "out_grad": (lambda t, ls: t.backward(ls[0], HEAD), lambda t, ls: ls[0].backward(HEAD)),
    "out_grad by name": (lambda t, ls: t.backward(ls[0], out_grad=HEAD), lambda t, ls: ls[0].backward(out_grad=HEAD)),
    "a list with None": (
        lambda t, ls: t.backward(ls[:2], head_grads=[HEAD, None]),
        lambda t, ls: autograd.backward(ls[:2], head_grads=[HEAD, None]),
    ),
    "train_mode": (
        lambda t, ls: t.backward(ls[0], train_mode=False),
        lambda t, ls: ls[0].backward(train_mode=False),
    ),
    "retain_graph": (
        lambda t, ls: [t.backward(ls[0], retain_graph=True), t.backward(ls[0], HEAD)],
        lambda t, ls: [ls[0].backward(retain_graph=True), ls[0].backward(HEAD)],
    ),
    "retain_graph second, as before": (
        lambda t, ls: [t.backward(ls[0], True), t.backward(ls[0])],
        lambda t, ls: [ls[0].backward(None, True), ls[0].backward()],
    ),
}


def in_scale_loss(trainer, losses):
    with trainer.scale_loss(losses[0]) as scaled:
        scaled.backward(HEAD, train_mode=False)


CALLS["scale_loss"] = (in_scale_loss, lambda t, ls: ls[0].backward(HEAD, train_mode=False))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_head_gradients_and_modes_are_those_of_autograd(policy, call):
    ours, plain = CALLS[call]
    assert_close(gradients(policy, ours, 2), gradients(None, plain, 2), policy)


@pytest.mark.parametrize(
    ("given", "error", "saying"),
    [
        (array(0, 4, 2), ValueError, "must have the shape, dtype and device of its loss"),
        (array(0, 4, 3).astype("float64"), ValueError, "must have the shape, dtype and device of its loss"),
        (array(0, 4, 3, ctx=mx.cpu(1)), ValueError, "must have the shape, dtype and device of its loss"),
        ([HEAD, HEAD], ValueError, "got 2 head gradients for 1 losses"),
        (np.ones((4, 3)), TypeError, "out_grad must be an NDArray or a list of them, got ndarray"),
        ("2", TypeError, "out_grad must be an NDArray"),
    ],
)
def test_a_head_gradient_that_does_not_fit_is_refused_and_nothing_has_changed(given, error, saying):
    def call(trainer, losses):
        with pytest.raises(error, match=saying):
            trainer.backward(losses[0], given)
        assert not trainer.ledger.pending
        trainer.backward(losses[0])

    assert_close(gradients("float16", call), gradients(None, lambda t, ls: ls[0].backward()))


def test_two_names_for_head_gradients_are_one_too_many():
    def call(trainer, losses):
        with pytest.raises(ValueError, match="out_grad and head_grads are two names"):
            trainer.backward(losses[0], HEAD, head_grads=HEAD)
        trainer.backward(losses[0])

    gradients("float16", call)


# -- trainers that the loss did not reach -----------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scalers", ["one", "each"])
@pytest.mark.parametrize("call", ["step", "allreduce_grads and update"])
def test_a_trainer_that_the_loss_did_not_reach_does_nothing_if_stale_gradients_are_ignored(policy, scalers, call):
    def learned(policy):
        nets = [made(policy, seed=seed) for seed in (1, 2)]
        shared = mxmp.DynamicLossScaler(128)
        scales = [shared if scalers == "one" else mxmp.DynamicLossScaler(128) for _ in nets]
        trainers = [trainer_of(policy, net, scale=scale) for net, scale in zip(nets, scales)]
        before = [values(net) for net in nets]
        for i in range(4):
            for net, trainer in zip(nets, trainers[: 1 + i % 2]):
                with autograd.record():
                    loss = net(array(0, 4, 6)).square().sum()
                backward(trainer, loss)
            for trainer in trainers:
                if call == "step":
                    trainer.step(4, ignore_stale_grad=True)
                else:
                    trainer.allreduce_grads()
                    trainer.update(4, ignore_stale_grad=True)
        return [a - b for net, old in zip(nets, before) for a, b in zip(values(net), old)], trainers

    found, trainers = learned(policy)
    assert_close(found, learned(None)[0], policy)
    assert [trainer.scaled_step.steps for trainer in trainers] == [4, 2]
    assert trainers[0].skipped_steps == 0


def test_a_trainer_that_was_not_reached_still_says_so_unless_told_to_ignore_it():
    net = made("float16")
    trainer = trainer_of("float16", net)
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        trainer.step(4)
    with autograd.record():
        loss = net(array(0, 4, 6)).square()
    loss.backward()  # is no stale gradient
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        trainer.step(4, ignore_stale_grad=True)


# -- one loss, two trainers, one of them over a Parameter of no net ---------------------------------


def margin():
    beta = gluon.Parameter("beta", shape=(1,))
    beta.initialize(mx.init.One())
    return beta


def of_margin(policy, order, between=lambda trainer: None, read=False, steps=3):
    net, beta = made(policy), margin()
    kind = mxmp.Trainer if policy else gluon.Trainer
    trainers = [kind(params, "sgd", {"learning_rate": 0.1}) for params in (net.collect_params(), [beta])]
    if read and policy:
        assert trainers[1].loss_scale == 2.0**16
    for _ in range(steps):
        with autograd.record():
            loss = (net(array(0, 4, 6)).square() * beta.data()).mean()
        trainers[0].backward(loss) if policy else loss.backward()
        for k in order:
            if policy and k == 1:
                between(trainers[1])
            trainers[k].step(4)
    return [*values(net), beta.data().asnumpy() - 1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    "between",
    [lambda t: None, lambda t: t.unscale(), lambda t: t.clip_global_norm(1e3), lambda t: t.allreduce_grads()],
    ids=["nothing", "unscale", "clip", "allreduce"],
)
def test_in_bfloat16_a_second_trainer_applies_the_true_gradients_of_a_loose_parameter(order, read, between):
    found = of_margin("bfloat16", order, between, read)
    assert_close(found, of_margin(None, order), "bfloat16")


def test_in_bfloat16_the_backward_of_the_second_trainer_says_what_to_share():
    net, beta = made("bfloat16"), margin()
    first = mxmp.Trainer(net.collect_params(), "sgd")
    second = mxmp.Trainer([beta], "sgd")
    with autograd.record():
        loss = (net(array(0, 4, 6)).square() * beta.data()).mean()
    second.backward(loss)
    second.step(4)
    before = values(net)
    with pytest.raises(UserWarning, match="give both the same scaler object"):
        first.step(4)
    with pytest.raises(RuntimeError, match="Give all trainers of one loss the same scaler object"):
        first.step(4, ignore_stale_grad=True)
    assert all(map(np.array_equal, before, values(net)))


def test_in_float16_true_gradients_of_another_trainer_are_still_refused():
    net, beta = made("float16"), margin()
    first = mxmp.Trainer([beta], "sgd", loss_scale=None)
    second = mxmp.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = (net(array(0, 4, 6)).square() * beta.data()).mean()
    first.backward(loss)
    with pytest.raises(RuntimeError, match="Give all trainers of one loss the same scaler object"):
        second.step(4)


# -- a plain backward -------------------------------------------------------------------------------


def said_of_plain(caught):
    return [str(each.message) for each in caught if "plain loss.backward()" in str(each.message)]


def plain_backwards(policy, times=3, trainer=None):
    """The warnings of a loop without ``trainer.backward``."""
    net = made(policy)
    trainer = trainer and trainer(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            with autograd.record():
                loss = net(array(0, 4, 6)).square().mean()
            loss.backward()
            for param in net.collect_params().values():
                param.set_data(param.data() - 0.1 * param.grad())
            net(array(1, 4, 6))
    return said_of_plain(caught)


@pytest.mark.parametrize("trainer", [None, lambda net: trainer_of("float16", net)])
def test_a_plain_backward_in_float16_is_warned_of_once(trainer):
    (said,) = plain_backwards("float16", trainer=trainer)
    assert "trainer.backward(loss)" in said
    assert "trainer.input_grad(x)" in said


def test_a_plain_backward_that_needs_no_scale_is_not_warned_of():
    assert not plain_backwards("bfloat16")
    assert not plain_backwards("float16", trainer=lambda net: trainer_of("float16", net, scale=None))
    assert not plain_backwards("float16", times=0)


def test_no_order_of_the_trainers_own_calls_is_taken_for_a_plain_backward():
    net = made("float16")
    trainer = trainer_of("float16", net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for call in (trainer.unscale, trainer.allreduce_grads, lambda: trainer.clip_global_norm(1.0)):
            with autograd.record():
                loss = net(array(0, 4, 6)).square().mean()
            trainer.backward(loss)
            call()
            net(array(1, 4, 6))
            trainer.step(4)
            net(array(1, 4, 6))
        with autograd.record():
            loss = net(array(0, 4, 6)).square().mean()
        with trainer.scale_loss(loss) as scaled:
            scaled.backward()
        trainer.discard()
        net(array(1, 4, 6))


def run_through(policy, scale, passes=2, times=3):
    """The warnings of a loop that trains an input of a net whose own weights no Trainer has."""
    net, image = made(policy), gluon.Parameter("image", shape=(4, 6))
    image.initialize(mx.init.One())
    trainer = mxmp.Trainer([image], "sgd", {"learning_rate": 0.1}, loss_scale=scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            with autograd.record():
                loss = sum((net(image.data()) - net(array(k, 4, 6))).square().mean() for k in range(passes))
            trainer.backward(loss)
            trainer.step(4)
    return said_of_plain(caught)


@pytest.mark.parametrize("scale", [1024.0, 1.0])
def test_a_scaled_backward_through_a_net_that_no_trainer_updates_is_no_plain_one(scale):
    assert not run_through("float16", scale)


def test_a_net_whose_trainer_comes_after_its_first_record_steps_without_a_loss_scale():
    net = made("float16")
    with autograd.record():
        net(array(0, 4, 6))
    trainer = trainer_of("float16", net, scale=None)
    before = net.weight.data().asnumpy()
    with autograd.record():
        loss = net(array(0, 4, 6)).square().mean()
    trainer.backward(loss)
    trainer.step(4)
    assert (net.weight.data().asnumpy() != before).all()
