"""Several trainers and one loss: one scaler object shared by all, or an error; never gradients of two scales in one."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.twins import (
    LOSS,
    POLICIES,
    array,
    assert_close,
    backward,
    convert,
    equal_or_refused,
    loss_of,
    seeded,
    step,
    trainer_of,
    updates,
)
from mxnet import autograd
from mxnet.gluon import nn

import mxmp


def parts(policy, request="write"):
    """An encoder and a decoder."""
    nets = [seeded(nn.Dense(4, in_units=6), seed=1), seeded(nn.Dense(2, in_units=4), seed=2)]
    for net in nets:
        net.collect_params().setattr("grad_req", request)
    convert(policy, *nets)
    return nets


def plain(nets):
    return [trainer_of(None, net) for net in nets]


def mixed(nets, *scales):
    return [trainer_of("float16", net, scale=scale) for net, scale in zip(nets, scales)]


def both(nets):
    return dict(enumerate(p for net in nets for p in net.collect_params().values()))


def expected(steps=1, request="write", backwards=1):
    """Plain FP32: one backward, a step of each."""
    nets = parts(None, request)
    trainers = plain(nets)

    def run():
        for i in range(steps):
            for k in range(backwards):
                loss_of(*nets, seed=10 * i + k).backward()
            for trainer in trainers:
                trainer.step(4)
            if request == "add":
                for net in nets:
                    net.collect_params().zero_grad()

    return updates(both(nets), run)


# -- a scaler of its own each -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float16", "float16 masters"])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize(
    "scales",
    [
        (64.0, 4096.0),
        (1024.0, 1024.0),
        ("dynamic", "dynamic"),
        (mxmp.StaticLossScaler(64.0), mxmp.StaticLossScaler(64.0)),
    ],
    ids=str,
)
def test_the_second_backward_of_one_loss_is_an_error(scales, request_, policy):
    nets = parts(POLICIES[policy], request_)
    first, second = mixed(nets, *scales)
    loss = loss_of(*nets)
    first.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="scaler"):
        second.backward(loss)


def test_the_first_trainer_s_gradients_survive_the_refusal():
    nets = parts("float16")
    first, second = mixed(nets, 64.0, 4096.0)
    loss = loss_of(*nets)

    def run():
        first.backward(loss, retain_graph=True)
        with pytest.raises(RuntimeError):
            second.backward(loss)
        first.step(4)

    assert_close(updates(both(nets[:1]), run), expected()[:2])


def critic_loss(nets, seed):
    """Of the second net alone."""
    with autograd.record():
        return LOSS(nets[1](array(seed, 4, 4)), mx.nd.ones((4, 2)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_backward_through_another_trainer_s_parameters_before_its_step_is_right_or_refused(order):
    """A GAN's discriminator whose step comes after the generator's backward."""

    def run(policy):
        nets = parts(policy)
        trainers = plain(nets) if policy is None else mixed(nets, 64.0, 4096.0)

        def steps():
            backward(trainers[1], critic_loss(nets, 0))
            backward(trainers[0], loss_of(*nets, seed=1))
            for i in order:
                trainers[i].step(4)

        return updates(both(nets), steps)

    full = run(None)
    equal_or_refused(lambda: run("float16"), lambda found: assert_close(found, full), saying="scaler")


def one_backward_two_steps():
    nets = parts("float16")
    first, second = mixed(nets, 64.0, 4096.0)

    def run():
        first.backward(loss_of(*nets))
        first.step(4)
        second.step(4)

    return updates(both(nets), run)


def test_one_backward_and_the_steps_of_two_scalers_is_right_or_refused():
    equal_or_refused(one_backward_two_steps, lambda found: assert_close(found, expected()))


def nested(order):
    nets = parts("float16")
    trainers = mixed(nets, 64.0, 4096.0)

    def run():
        loss = loss_of(*nets)
        if order == "of the scaled loss":
            with trainers[0].scale_loss(loss) as once, trainers[1].scale_loss(once) as twice:
                autograd.backward(twice)
        elif order == "of the loss":
            with trainers[0].scale_loss(loss), trainers[1].scale_loss(loss) as scaled:
                autograd.backward(scaled)
        else:
            with trainers[0].scale_loss(loss):
                trainers[1].backward(loss)
        for trainer in trainers:
            trainer.step(4)

    return updates(both(nets), run)


@pytest.mark.parametrize("order", ["of the scaled loss", "of the loss", "around backward"])
def test_nested_scale_loss_is_right_or_refused(order):
    equal_or_refused(lambda: nested(order), lambda found: assert_close(found, expected()), saying="scale")


def nested_in_itself(how):
    nets = parts("float16")
    (trainer,) = mixed([nets[0]], 64.0)

    def run():
        loss = loss_of(*nets)
        with trainer.scale_loss(loss) as once:
            if how == "backward inside":
                trainer.backward(loss)
            elif how == "backward of the scaled":
                trainer.backward(once)
            else:
                with trainer.scale_loss(once) as twice:
                    autograd.backward(twice)
        trainer.step(4)

    return updates(both(nets[:1]), run)


@pytest.mark.parametrize("how", ["backward inside", "backward of the scaled", "twice"])
def test_scale_loss_inside_its_own_scale_loss_is_right_or_refused(how):
    equal_or_refused(lambda: nested_in_itself(how), lambda found: assert_close(found, expected()[:2]))


# -- one scaler for all -----------------------------------------------------------------------------


def test_a_backward_through_each_is_as_good():
    """``A.backward(loss, retain_graph=True); B.backward(loss)`` writes the same gradients twice."""
    nets = parts("float16")
    scaler = mxmp.DynamicLossScaler(1024.0, growth_interval=1)
    trainers = mixed(nets, scaler, scaler)

    def run():
        for i in range(2):
            loss = loss_of(*nets, seed=10 * i)
            trainers[0].backward(loss, retain_graph=True)
            trainers[1].backward(loss)
            for trainer in trainers:
                trainer.step(4)

    assert_close(updates(both(nets), run), expected(2))
    assert scaler.loss_scale == 4096.0


def test_a_trainer_that_a_backward_does_not_reach_may_save_its_states(tmp_path):
    nets = [seeded(nn.Dense(4, in_units=6), seed=k) for k in (1, 2)]
    convert("float16", *nets)
    scaler = mxmp.DynamicLossScaler(1024.0)
    trainers = mixed(nets, scaler, scaler)
    step(trainers[0], loss_of(nets[0]))
    trainers[1].save_states(str(tmp_path / "states"))
    trainers[0].backward(loss_of(nets[1]))  # its own step has nothing to do
    for trainer in trainers:
        trainer.step(4, ignore_stale_grad=True)
    scaler.loss_scale = 8
    assert trainers[0].loss_scale == 8
