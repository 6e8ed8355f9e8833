"""With ``static_shape`` gradients are those of a net without it, whatever else of a record reads the weights.

Plain MXNet's are wrong in each sequence here: its backward goes on writing into the arrays that it wrote first.
"""

from __future__ import annotations

import itertools
import weakref

import mxnet as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.twins import FLAGS, array, backward, seeded, sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon import _mxnet

FP32 = mxmp.Policy("float16", exclude=["*"])

pytestmark = pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning")


class Run:
    """A net in training, with a policy of None in plain MXNet as Python code, and its gradients so far."""

    def __init__(self, policy, devices=1):
        self.devices = [mx.cpu(i) for i in range(devices)]
        self.net = sequence(nn.Dense(5, in_units=6, activation="tanh"), nn.Dense(3, in_units=5))
        seeded(self.net, self.devices)
        self.params = list(self.net.collect_params().values())
        self.found, self.kept, self.batches, self.trainer = [], [], itertools.count(), None
        if policy is not None:
            mxmp.convert(self.net, policy).hybridize(**FLAGS["static"])
            self.trainer = mxmp.Trainer(self.params, "sgd", {"learning_rate": 0}, loss_scale=64)

    def square(self, ctx):
        return self.net(array(next(self.batches), 4, 6, ctx=ctx)).square().sum()

    def backward(self, losses):
        backward(self.trainer, losses)
        if self.trainer is not None:
            self.trainer.unscale()
        self.found.append([grad.asnumpy() for param in self.params for grad in param.list_grad()])
        if self.trainer is not None:
            self.trainer.step(1)


def one_call(run):
    with autograd.record():
        losses = [run.square(ctx) for ctx in run.devices]
    run.backward(losses)


def two_calls(run):
    with autograd.record():
        losses = [run.square(ctx) + run.square(ctx) for ctx in run.devices]
    run.backward(losses)


def two_losses(run):
    with autograd.record():
        losses = [run.square(ctx) for ctx in 2 * run.devices]
    run.backward(losses)


def penalty(run):
    with autograd.record():
        losses = [run.square(ctx) + sum(p.data(ctx).square().sum() for p in run.params) for ctx in run.devices]
    run.backward(losses)


def retained(run):
    """Two backwards of one record: the second overwrites what the first has written."""
    with autograd.record():
        losses = [run.square(ctx) for ctx in run.devices]
    backward(run.trainer, losses, retain_graph=True)
    run.backward(losses)


def no_backward(run):
    with autograd.record():
        run.found.append([run.square(run.devices[0]).asnumpy()])


def keep(run):
    with autograd.record():
        run.kept.append([run.square(ctx) for ctx in run.devices])


def keep_penalty(run):
    with autograd.record():
        losses = [run.square(ctx) + sum(p.data(ctx).square().sum() for p in run.params) for ctx in run.devices]
    run.kept.append(losses)


def backward_of_kept(run):
    if run.kept:
        run.backward(run.kept.pop())


def forget_kept(run):
    run.kept.clear()


def as_a_gan(run):
    """Of one call the output is used without a gradient, and is there until the next one has ended."""
    for is_trained in (False, True):
        with autograd.record():
            fake = [run.square(ctx) for ctx in run.devices]
        if is_trained:
            run.backward(fake)


def of_weights(run):
    """By ``autograd.grad``, whose arrays are no gradients of the Parameters."""
    weights = [param.data(run.devices[0]) for param in run.params]
    with autograd.record():
        loss = run.square(run.devices[0])
    run.found.append([grad.asnumpy() for grad in autograd.grad(loss, weights)])


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


STEPS = [
    *(one_call, two_calls, two_losses, penalty, retained, no_backward, of_weights, as_a_gan),
    *(keep, keep_penalty, backward_of_kept, forget_kept),
]


@given(steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=9), devices=st.integers(1, 2))
@example([two_calls, one_call], 2)
@example([one_call, penalty, retained], 1)
@example([keep_penalty, one_call, backward_of_kept], 1)
def test_gradients_are_those_of_python_code_whatever_comes_before(steps, devices):
    expected, run = Run(None, devices), Run(FP32, devices)
    for step in [*steps, one_call]:
        step(expected)
        step(run)
    assert_equal(run.found, expected.found)


def test_nets_may_share_weights_in_some_steps():
    """An encoder that two heads read, then one."""
    found = []
    for policy in (None, FP32):
        encoder = nn.Dense(5, in_units=6)
        first, second = sequence(encoder, nn.Dense(3, in_units=5)), sequence(encoder, nn.Dense(2, in_units=5))
        both = gluon.nn.Sequential()
        both.add(first, second)
        seeded(both)
        if policy is not None:
            for net in (first, second):
                mxmp.convert(net, policy).hybridize(**FLAGS["static"])
            trainer = mxmp.Trainer(both.collect_params(), "sgd", {"learning_rate": 0}, loss_scale=1)
        for nets in ([first, second], [first], [second, first], [second]):
            with autograd.record():
                loss = sum(net(array(len(nets), 4, 6)).square().sum() for net in nets)
            (loss if policy is None else trainer).backward(*([] if policy is None else [loss]))
            found.append([encoder.weight.grad().asnumpy()])
    assert_equal(found[4:], found[:4])


def test_a_backward_of_another_net_is_not_taken_for_this_one_s():
    """After a penalty on the one net; the records of both have one size otherwise."""
    expected, run, other = Run(None), Run(FP32), Run(FP32)
    for step, of_other in [(one_call, one_call), (penalty, one_call), (retained, retained), (one_call, one_call)]:
        for each in (expected, run):
            step(each)
        of_other(other)
    assert_equal(run.found, expected.found)


def calls_of(*steps):
    """Return, of each call in these, whether it is one with the flag, and how many calls with it had their record."""
    found, held, cached_op = [], weakref.WeakSet(), mxmp.gluon.graphs._CachedOp

    class Noting(cached_op):
        def __init__(self, symbol, flags):
            super().__init__(symbol, flags)
            self.has_flag = dict(flags).get("static_shape", False)

        def __call__(self, *args):
            found.append((self.has_flag, len(held)))
            return super().__call__(*args)

    class Counted(_mxnet.Recorded):
        def __init__(self, out):
            super().__init__(out)
            held.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxmp.gluon.graphs, "_CachedOp", Noting)
        patch.setattr(_mxnet, "Recorded", Counted)
        run = Run(FP32)
        for step in steps:
            step(run)
    return found


def kept_after(*steps):
    """Return whether the last call, after these, is one with the flag."""
    return calls_of(*steps)[-1][0]


def test_the_flag_stays_for_one_call_in_each_record():
    assert kept_after(one_call, one_call, one_call)


def test_the_flag_stays_after_calls_that_are_left_without_a_backward():
    assert kept_after(no_backward, one_call, one_call)
    assert kept_after(keep, one_call, forget_kept, one_call, one_call)
    assert kept_after(as_a_gan, as_a_gan, one_call)
    assert not kept_after(keep, one_call)


def test_a_call_that_is_left_without_a_backward_gives_its_memory_to_the_next_one():
    assert calls_of(no_backward, no_backward, one_call, one_call) == 4 * [(True, 0)]


def test_the_flag_goes_where_no_trainer_runs_the_backward():
    def plain(run):
        with autograd.record():
            loss = run.square(run.devices[0])
        loss.backward()
        for param in run.params:
            param.zero_grad()

    assert not kept_after(plain, plain)
