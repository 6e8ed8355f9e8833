"""The order of gradients in a backward: the inputs of training graphs in reverse, with the same numbers."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.twins import assert_same
from mxnet import autograd, gluon

import mxmp
from mxmp.kernels.memory import write_gradients_early
from mxmp.precision.graph import Graph


def chain(policy: str) -> Graph:
    out = mx.sym.var("data")
    for number in range(3):
        out = mx.sym.FullyConnected(out, name=f"fc{number}", num_hidden=4)
    return Graph.from_symbol(mxmp.cast_symbol(out, policy))


def test_the_last_layer_s_weights_come_first_where_weights_are_cast():
    graph = chain("bfloat16")
    before = graph.to_symbol().list_inputs()
    write_gradients_early(graph)
    assert graph.to_symbol().list_inputs() == [*before[:0:-1], "data"]
    assert before[0] == "data"


def test_a_graph_without_casts_of_weights_stays_as_it_is():
    graph = Graph.from_symbol(mx.sym.FullyConnected(mx.sym.var("data"), name="fc", num_hidden=4))
    before = graph.to_json()
    write_gradients_early(graph)
    assert graph.to_json() == before


def trained(policy: str, monkeypatch: pytest.MonkeyPatch, reverse: bool) -> list[np.ndarray]:
    if not reverse:
        monkeypatch.setattr("mxmp.gluon.graphs.write_gradients_early", lambda graph: None)
    mx.random.seed(0)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(16, 3), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
        net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    mxmp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    data = mx.nd.array(np.random.RandomState(0).normal(0, 1, (8, 3, 6, 6)))
    for _ in range(3):
        with autograd.record():
            loss = (net(data) ** 2).sum()
        trainer.backward(loss)
        trainer.step(8)
    return [param.data().asnumpy() for param in net.collect_params().values()] + [net(data).asnumpy()]


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "float16,params=float16"])
def test_the_order_changes_no_bit_of_training(policy, monkeypatch):
    assert_same(trained(policy, monkeypatch, True), trained(policy, monkeypatch, False))
