"""Several trainers and one loss: one scaler object shared by all, or an error; never gradients of two scales in one."""

from __future__ import annotations

import pytest
from kit.twins import (
    POLICIES,
    convert,
    loss_of,
    seeded,
    step,
    trainer_of,
)
from mxnet.gluon import nn

import mxmp


def parts(policy, request="write"):
    """An encoder and a decoder."""
    nets = [seeded(nn.Dense(4, in_units=6), seed=1), seeded(nn.Dense(2, in_units=4), seed=2)]
    for net in nets:
        net.collect_params().setattr("grad_req", request)
    convert(policy, *nets)
    return nets


def mixed(nets, *scales):
    return [trainer_of("float16", net, scale=scale) for net, scale in zip(nets, scales)]


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


# -- one scaler for all -----------------------------------------------------------------------------


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
