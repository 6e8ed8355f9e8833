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


def test_exposed_weights_cost_a_handful_of_operators_and_only_written_ones_are_taken_over():
    net, (x,) = layers()
    net.initialize()
    mxmp.convert(net, bench_host.STORED["float16"])
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=2.0)
    operations(trainer, net, x)
    before = operations(trainer, net, x)
    net[3].weight.data().wait_to_read()
    read = operations(trainer, net, x) - before
    assert 0 < read <= 8
    net[3].weight.data()[:] = 0.5
    assert 0 < operations(trainer, net, x) - before - read <= 8
    assert abs(net[3].weight.masters()[0].asnumpy() - 0.5).max() < 0.1
    for layer in net:
        layer.weight.data().wait_to_read()
    assert 0 < operations(trainer, net, x) - before <= 2 * read  # of sixty: four operators each before
