"""The dispatcher: many threads, modes and structures on one net; files, monitors and namedtuples beside it."""

from __future__ import annotations

import json
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

FLAGS = {"not hybridized": None, "dynamic": {}, "static": {"static_alloc": True, "static_shape": True}}
Pair = namedtuple("Pair", ["left", "right"])


class Shifting(gluon.HybridBlock):
    """Another number and nesting of outputs in each mode and for each number of inputs, as detectors have."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)
            self.norm = nn.BatchNorm(in_channels=6, momentum=1.0)

    def hybrid_forward(self, F, x, more=None):  # noqa: N803
        x = self.norm(self.body(x))
        if more is None:
            return (x * 2, [x, x + 1]) if autograd.is_training() else x
        if autograd.is_training():
            return [x + more[0], more[1]]
        return Pair(x, (more[0] + more[1],))


KINDS = [(training, inputs) for training in (True, False) for inputs in (1, 2)]


def seeded(net, seed=1):
    net.initialize()
    rng = np.random.RandomState(seed)
    for name, param in net.collect_params().items():
        if not name.endswith(("running_mean", "running_var")):
            param.set_data(mx.nd.array(rng.uniform(-0.5, 0.5, param.shape)))
    return net


def array(seed):
    return mx.nd.array(np.random.RandomState(seed).randn(4, 6))


def flat(out):
    return [a for item in out for a in flat(item)] if isinstance(out, (list, tuple)) else [out.asnumpy()]


def call(net, kind, seed):
    training, inputs = kind
    args = (array(seed),) if inputs == 1 else (array(seed), [array(seed + 1), array(seed + 2)])
    with autograd.record(training) if training else autograd.pause():
        return flat(net(*args))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "compute=float16,params=float16"])
def test_eight_threads_make_two_thousand_calls_of_one_net_as_one_thread_makes_them(policy, flags):
    net = mxmp.convert(seeded(Shifting()), policy)
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])
    jobs = [(KINDS[(i * 7 + i // 8) % 4], i % 12) for i in range(2000)]
    twin = mxmp.convert(seeded(Shifting()), policy)
    expected = {job: call(twin, *job) for job in dict.fromkeys(jobs)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: call(net, *job), jobs, chunksize=5))
    for job, result in zip(jobs, found):
        assert len(result) == len(expected[job])
        for a, b in zip(result, expected[job]):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("flags", FLAGS)
def test_threads_that_differentiate_get_their_own_gradients(flags):
    """Gradients with respect to each thread's own input; the net's own parameters take none."""
    net = mxmp.convert(seeded(Shifting()))
    net.collect_params().setattr("grad_req", "null")
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])

    def gradient(seed):
        x = array(seed)
        x.attach_grad()
        with autograd.record():
            first, rest = net(x)
            loss = (first * rest[0]).sum()
        loss.backward()
        return x.grad.asnumpy()

    expected = {seed: gradient(seed) for seed in range(8)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (i % 8, gradient(i % 8)), range(400)))
    for seed, result in found:
        np.testing.assert_array_equal(result, expected[seed])


def test_the_structure_of_outputs_is_each_call_s_own():
    net = mxmp.convert(seeded(Shifting()))
    for _ in range(2):
        x = array(0)
        with autograd.record():
            first, (second, third) = net(x)
        assert [a.shape for a in (first, second, third)] == [(4, 6)] * 3
        assert net(x).shape == (4, 6)
        pair = net(x, [x, x])
        assert isinstance(pair, Pair)
        assert pair.right[0].shape == (4, 6)


@pytest.mark.parametrize("last", KINDS)
def test_block_save_holds_the_graph_of_the_last_call_and_its_structure(last, tmp_path):
    net = mxmp.convert(seeded(Shifting()))
    for kind in [*KINDS, last]:
        call(net, kind, 0)
    net.save(str(tmp_path / "low"))
    plain = seeded(Shifting())
    plain.hybridize()
    call(plain, last, 0)
    plain.save(str(tmp_path / "plain"))
    low, full = (json.loads((tmp_path / f"{n}-model.json").read_text())["shifting0"] for n in ("low", "plain"))
    for what in ("in_format", "out_format", "hybridized"):
        assert low[what] == full[what]


def test_a_monitor_sees_the_low_graph():
    net = mxmp.convert(seeded(nn.Dense(3, in_units=6)))
    net.hybridize()
    seen = []
    net.register_op_hook(lambda name, array: seen.append(name))
    net(array(0))
    mx.nd.waitall()
    assert seen


def test_hybridize_in_the_middle_takes_hold_at_once_even_for_forward():
    net = mxmp.convert(seeded(nn.Dense(3, in_units=6)))
    want = net(array(0)).asnumpy()
    for flags in ({}, {"active": False}, {"static_alloc": True}, {"clear": False}, {"active": False, "clear": False}):
        net.hybridize(**flags)
        np.testing.assert_array_equal(net.forward(array(0)).asnumpy(), want)
        assert [key for key, _ in mxmp.gluon.hook.hook_of(net).graphs.items()]
    mxmp.restore(net)
    assert net._active is False


def test_a_thread_that_prints_a_summary_does_not_change_the_calls_of_another(capsys):
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=6), nn.Dense(3, in_units=5))
    mxmp.convert(seeded(net))
    want = net(array(0)).asnumpy()
    found = []

    def other(*_):
        worker = threading.Thread(target=lambda: found.append(net(array(0)).asnumpy()))
        worker.start()
        worker.join(30)

    handle = net[0].register_forward_hook(other)
    net.summary(array(0))
    handle.detach()
    assert "Total params: 53" in capsys.readouterr().out
    np.testing.assert_array_equal(found[0], want)
    np.testing.assert_array_equal(net(array(0)).asnumpy(), want)
