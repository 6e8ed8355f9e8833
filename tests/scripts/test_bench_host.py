"""The cost of a step on the host: operations of MXNet's engine, counted by its profiler, beside MXNet's own Trainer."""

from __future__ import annotations

import mxnet as mx
import pytest
from bench import host as bench_host
from mxnet import gluon

import mxmp


def layers():
    net = gluon.nn.HybridSequential()
    net.add(*(gluon.nn.Dense(4, in_units=4) for _ in range(60)))
    return net, [mx.nd.ones((1, 4))]


@pytest.mark.parametrize("stored", bench_host.STORED)
@pytest.mark.parametrize("optimizer", bench_host.OPTIMIZERS)
def test_a_step_takes_a_quarter_more_operations_than_mxnet_s_and_twenty_at_most(optimizer, stored, monkeypatch):
    monkeypatch.setitem(bench_host.NETS, "layers", layers)
    found = bench_host.measure("layers", optimizer, stored, rounds=1)
    assert found["parameters"] == 120
    assert found["ops"] <= 1.25 * found["their_ops"] + 20


def operations(trainer, net, x):
    return bench_host.backward_and_step(lambda: net(x), trainer, bench_host.counted)


def test_only_weights_that_someone_has_asked_for_are_looked_at():
    net, (x,) = layers()
    net.initialize()
    mxmp.convert(net, bench_host.STORED["float16"])
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=2.0)
    operations(trainer, net, x)
    before = operations(trainer, net, x)
    net[3].weight.data()[:] = 0.5
    assert 0 < operations(trainer, net, x) - before <= 8
    assert abs(net[3].weight.masters()[0].asnumpy() - 0.5).max() < 0.1
