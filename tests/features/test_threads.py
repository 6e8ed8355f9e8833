"""One converted net, several threads, training modes and input structures: every call as if it were alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from kit.twins import FLAGS, array, assert_same, seeded
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

POLICIES = ["float16", "bfloat16"]


class Flexible(gluon.HybridBlock):
    """One or two inputs, and statistics that tell the training mode."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)
            self.norm = nn.BatchNorm(in_channels=6, momentum=1.0)

    def hybrid_forward(self, F, x, more=None):  # noqa: N803
        x = self.norm(self.body(x))
        if autograd.is_training():
            x = x * 2
        return (x, x + more) if more is not None else x


CALLS = {
    "training": (True, 1),
    "inference": (False, 1),
    "training, two inputs": (True, 2),
    "inference, two inputs": (False, 2),
}


def converted(policy, flags=None):
    net = mxmp.convert(seeded(Flexible()), policy)
    if flags is not None:
        net.hybridize(**flags)
    return net


def call(net, kind, seed):
    training, inputs = CALLS[kind]
    x = [array(seed + i, 4, 6) for i in range(inputs)]
    if training:
        with autograd.record():
            out = net(*x)
    else:
        out = net(*x)
    return [o.asnumpy() for o in (out if isinstance(out, (list, tuple)) else [out])]


def in_a_thread(run):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(timeout=60)


@pytest.mark.parametrize(
    ("by", "flags"), [*(("another thread", flags) for flags in FLAGS), ("a hook of the net's own", "not hybridized")]
)
@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize("outer", CALLS)
def test_a_call_in_the_middle_of_another_call_changes_neither(outer, inner, flags, by):
    """The second call falls between the first one's hooks and its forward."""
    net = converted("float16", FLAGS[flags])
    expected = {kind: call(net, kind, 0) for kind in CALLS}
    between = []

    def meanwhile(block, args):
        if threading.current_thread() is not threading.main_thread() or between:
            return
        between.append(None)
        if by == "another thread":
            between[0] = in_a_thread(lambda: call(net, inner, 0))
        else:
            with autograd.pause(train_mode=False):
                between[0] = call(net, inner, 0)

    handle = net.register_forward_pre_hook(meanwhile)
    assert_same(call(net, outer, 0), expected[outer])
    handle.detach()
    assert_same(between[0], expected[inner])


@pytest.mark.parametrize("policy", POLICIES)
def test_eight_threads_that_make_the_first_calls(policy):
    twin = converted(policy)
    expected = {kind: call(twin, kind, 0) for kind in CALLS}
    net = converted(policy)
    ready = threading.Barrier(8)

    def first(i):
        kind = list(CALLS)[i % 4]
        ready.wait(timeout=30)
        return kind, call(net, kind, 0)

    with ThreadPoolExecutor(8) as pool:
        for kind, result in pool.map(first, range(8)):
            assert_same(result, expected[kind])


def test_two_threads_train_two_nets_while_a_third_net_serves_both():
    """A frozen feature extractor under two heads, each with its thread and its trainer."""

    def train(features, head, seed):
        trainer = mxmp.Trainer(head.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=256.0, kvstore=None)
        for i in range(30):
            x = features(array(seed + i, 4, 6))
            with autograd.record():
                loss = (head(x) ** 2).sum()
            trainer.backward(loss)
            trainer.step(4)
        return head.weight.data().asnumpy()

    def nets():
        made = converted("float16"), *(seeded(nn.Dense(2, in_units=6), seed=i) for i in (3, 4))
        for net in made[1:]:
            mxmp.convert(net)
        return made

    features, *heads = nets()
    expected = [train(features, head, 100 * i) for i, head in enumerate(heads)]
    features, *heads = nets()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda pair: train(features, pair[1], 100 * pair[0]), enumerate(heads)))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["trainer.backward", "plain backward"])
def test_a_scaled_backward_in_one_thread_is_not_seen_in_another(kind):
    """A loss head under a trainer of scale 1024 here, and under one of scale 2 or none there."""

    class Head(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.body = nn.Dense(3, in_units=6)

        def hybrid_forward(self, F, x, label):  # noqa: N803
            return F.SoftmaxOutput(self.body(x), label)

    def gradients(job):
        net, scale, seed = job
        net = mxmp.convert(net)
        scaled = scale is not None
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scale) if scaled else None
        found = []
        for i in range(40):
            with autograd.record():
                out = net(array(seed + i, 4, 6), mx.nd.array([0, 1, 2, 0]))
            if scaled:
                trainer.backward(out)
            else:
                out.backward()
            found.append(net.body.weight.grad().asnumpy() / (scale if scaled else 1.0))
        return found

    def jobs():
        return [(seeded(Head()), 1024.0, 0), (seeded(Head()), 2.0 if kind == "trainer.backward" else None, 50)]

    expected = [gradients(job) for job in jobs()]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(gradients, jobs()))
    for a, b in zip(found, expected):
        for low, full in zip(a, b):
            np.testing.assert_allclose(low, full, rtol=0, atol=1e-2 * np.abs(full).max())
