"""No update divides gradients by a loss scale that they never had, or applies those that still have one, in silence."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
from kit.twins import (
    MASTERS,
    array,
    assert_same,
    convert,
    loss_of,
    seeded,
    sequence,
    trainer_of,
    values,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp


def dense(seed=1, units=3, **kwargs):
    return seeded(nn.Dense(units, in_units=6, **kwargs), seed=seed)


def refused(net, run, *, saying, kind=RuntimeError):
    """``run`` raises, and no weight has changed."""
    before = values(net)
    with pytest.raises(kind, match=saying):
        run()
    assert_same(values(net), before)


POLICIES = [None, "float16", MASTERS]


def converted(policy, seed=1):
    net = dense(seed)
    convert(policy, net)
    return net


# -- scale_loss and another loss --------------------------------------------------------------------


def test_no_step_follows_a_backward_of_another_loss_within_scale_loss():
    net = converted("float16")
    trainer = trainer_of("float16", net)
    loss = loss_of(net)
    with pytest.raises(RuntimeError, match=r"scaled\.backward"), trainer.scale_loss(loss):
        loss.backward()
    refused(net, lambda: trainer.step(4), saying="trainer.backward")


@pytest.mark.parametrize("plain", ["no", "before", "after"])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_after_the_block_is_refused_as_it_looks_like_a_plain_one(policy, request_, plain):
    net = converted(policy)
    net.collect_params().setattr("grad_req", request_)
    trainer = trainer_of("float16", net)
    loss, other = loss_of(net, seed=3), loss_of(net, seed=5)
    with trainer.scale_loss(loss) as scaled:
        pass
    for each in {"no": [scaled], "before": [other, scaled], "after": [scaled, other]}[plain]:
        each.backward()
    refused(net, lambda: trainer.step(4), saying="call backward in the block")


def test_an_exception_within_scale_loss_is_the_one_that_comes_out():
    net = converted("float16")
    trainer = trainer_of("float16", net)
    loss = loss_of(net)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), trainer.scale_loss(loss):
        fail(autograd.backward(loss))


# -- a plain backward among scaled ones -------------------------------------------------------------


@pytest.mark.parametrize("last", ["step", "update", "unscale", "clip", "allreduce"])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_backward_between_a_scaled_one_and_the_step_is_refused(policy, request_, last):
    net = converted(policy)
    net.collect_params().setattr("grad_req", request_)
    trainer = trainer_of("float16", net)
    ends = {
        "step": lambda: trainer.step(4),
        "update": lambda: trainer.update(4),
        "unscale": trainer.unscale,
        "clip": lambda: trainer.clip_global_norm(1.0),
        "allreduce": trainer.allreduce_grads,
    }
    trainer.backward(loss_of(net))
    loss_of(net, seed=5).backward()
    refused(net, ends[last], saying=r"plain backward.*1024")


def test_a_plain_backward_that_reaches_a_part_is_refused():
    body, head = mxmp.convert(dense(units=6)), dense(2)
    trainer = trainer_of("float16", body, head)
    with autograd.record():
        out = head(body(array(0, 4, 6)))
    trainer.backward(out)
    with autograd.record():
        out = head(array(0, 4, 6))
    out.backward()
    refused(body, lambda: trainer.step(4), saying=f"{head.name}_weight")


def test_a_plain_backward_before_a_scaled_one_that_adds_to_it_is_refused():
    net = converted("float16")
    net.collect_params().setattr("grad_req", "add")
    trainer = trainer_of("float16", net)
    loss_of(net).backward()
    refused(net, lambda: trainer.backward(loss_of(net, seed=5)), saying="plain backward")


def test_gradients_that_a_plain_backward_wrote_and_the_scaled_one_does_not_reach_are_refused():
    one, two = mxmp.convert(dense()), dense(2)
    trainer = trainer_of("float16", one, two)
    loss_of(two).backward()
    trainer.backward(loss_of(one))
    refused(two, lambda: trainer.step(4, ignore_stale_grad=True), saying=two.name)
    two.collect_params().zero_grad()
    trainer.step(4, ignore_stale_grad=True)


def test_gradients_that_another_trainer_s_scale_is_in_are_not_applied():
    """One loss through both, where the second Trainer was told not to scale."""
    body, head = mxmp.convert(dense(units=6)), dense(2)
    first, second = trainer_of("float16", body), trainer_of("float16", head, scale=None)
    with autograd.record():
        out = head(body(array(0, 4, 6)))
    first.backward(out)
    first.step(4)
    refused(head, lambda: second.step(4), saying="has not been updated", kind=UserWarning)


# -- a plain Trainer's step -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_a_plain_trainer_does_not_apply_scaled_gradients(policy):
    net = converted(policy)
    plain = trainer_of(None, net)
    trainer = trainer_of("float16", net)
    trainer.backward(loss_of(net))
    refused(net, lambda: plain.step(4), saying="has not been updated", kind=UserWarning)
    before = values(net)
    plain.step(4, ignore_stale_grad=True)
    np.testing.assert_array_equal(values(net)[0], before[0])


def test_a_plain_trainer_that_was_made_later_is_warned_of():
    net = dense()
    trainer = trainer_of("float16", net)
    trainer_of(None, net)
    with pytest.warns(UserWarning, match=r"gluon\.trainer\.Trainer.*after this"):
        trainer.backward(loss_of(net))
    trainer.backward(loss_of(net))


# -- float16 and a plain Trainer --------------------------------------------------------------------


def small_step(net, trainer):
    """A loss whose gradients float16 flushes to zero, as the issue has it."""
    with autograd.record():
        loss = net(array(0, 4, 6)).sum() * 1e-9
    loss.backward()
    trainer.step(1)


@pytest.mark.parametrize("forward_first", [False, True])
def test_float16_under_a_plain_trainer_warns_once_and_names_ours(forward_first):
    net = mxmp.convert(dense(), "float16")
    if forward_first:
        with autograd.record():
            net(array(0, 4, 6))
    plain = trainer_of(None, net)
    with pytest.warns(UserWarning, match=r"mxmp\.Trainer.*bfloat16"):
        small_step(net, plain)
    small_step(net, plain)


def test_the_warning_comes_also_where_the_first_parameter_has_no_trainer():
    net = mxmp.convert(dense(), "float16,params=float32")
    some = list(net.collect_params().values())[1:]
    plain = gluon.Trainer(some, "sgd")
    with pytest.warns(UserWarning, match=r"mxmp\.Trainer"):
        small_step(net, plain)


@pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning")
@pytest.mark.parametrize(
    ("policy", "scope", "grad_req", "trainers"),
    [
        ("bfloat16", autograd.record, "write", [None]),
        ("float16", autograd.pause, "write", [None]),
        ("float16", autograd.record, "null", [None]),
        ("float16", autograd.record, "write", ["float16"]),
        ("float16", autograd.record, "write", []),
    ],
    ids=["bfloat16", "inference", "frozen", "ours", "no trainer"],
)
def test_no_warning_where_nothing_is_lost(policy, scope, grad_req, trainers):
    net, x = mxmp.convert(dense(), policy), array(0, 4, 6)
    net.collect_params().setattr("grad_req", grad_req)
    _living = [trainer_of(each, net) for each in trainers]
    x.attach_grad()
    for _ in range(2):
        with scope():
            net(x)


# -- a scale that nothing needs ---------------------------------------------------------------------


def lines(caplog, *nets, **kwargs):
    trainer = trainer_of("float16", *nets, **{"scale": "dynamic", **kwargs})
    with caplog.at_level(logging.WARNING, logger="mxmp"):
        for _ in range(2):
            trainer.backward([loss_of(net) for net in nets])
            trainer.step(4)
    return [record.getMessage() for record in caplog.records if "no net is converted" in record.getMessage()]


@pytest.fixture
def nothing_converted(monkeypatch):
    """Other tests' nets may be alive."""
    gc.collect()
    monkeypatch.setattr("mxmp.gluon.conversion._last_forward", type(mxmp.gluon.conversion._last_forward)())


@pytest.mark.usefixtures("nothing_converted")
def test_a_trainer_over_a_net_that_nobody_converted_says_so_once(caplog):
    assert len(lines(caplog, dense())) == 1


@pytest.mark.usefixtures("nothing_converted")
@pytest.mark.parametrize("scale", [None, 64.0, mxmp.DynamicLossScaler()])
def test_a_scale_that_was_chosen_is_meant(caplog, scale):
    assert lines(caplog, dense(), scale=scale) == []


@pytest.mark.usefixtures("nothing_converted")
def test_a_critic_that_stays_fp32_beside_a_converted_net_is_meant(caplog):
    generator = mxmp.convert(dense(), "float16")
    assert lines(caplog, dense(2)) == []
    assert lines(caplog, generator, dense(3)) == []


def test_a_backward_of_loss_heads_after_the_block_that_scales_them_is_refused():
    net = sequence(dense(), nn.HybridLambda(lambda op, x: op.MakeLoss(op.square(x))))
    mxmp.convert(net, "float16")
    trainer = trainer_of("float16", net)
    for late in (False, True, False):
        with autograd.record():
            loss = net(array(0, 4, 6))
        with trainer.scale_loss(loss) as scaled:
            if not late:
                autograd.backward(scaled)
        if late:
            autograd.backward(scaled)
            with pytest.raises(RuntimeError, match="call backward in the block"):
                trainer.step(4)
        else:
            trainer.step(4)
