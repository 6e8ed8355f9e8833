"""The order of gradients in a backward: the inputs of training graphs in reverse, with the same numbers. And loops,
which read memory of their own.
"""

from __future__ import annotations

import os
from typing import Iterator

import mxnet as mx
import numpy as np
import pytest
from kit.twins import assert_same
from mxnet import autograd, gluon

import mxmp
from mxmp.kernels.memory import MATCH_RANGE, _warn_of_shared_memory, write_gradients_early
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


def test_a_training_s_graph_has_the_order_and_an_inference_s_has_not(monkeypatch):
    ordered = []
    monkeypatch.setattr("mxmp.gluon.graphs.write_gradients_early", ordered.append)
    net = gluon.nn.Dense(4, in_units=8)
    net.initialize()
    mxmp.convert(net, "bfloat16")
    net(mx.nd.ones((2, 8)))
    assert not ordered
    with autograd.record():
        net(mx.nd.ones((2, 8)))
    assert len(ordered) == 1


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "float16,params=float16"])
def test_the_order_changes_no_bit_of_training(policy, monkeypatch):
    assert_same(trained(policy, monkeypatch, True), trained(policy, monkeypatch, False))


# -- Loops ------------------------------------------------------------------------------------------


class LoopBehindConvolutions(gluon.HybridBlock):
    """oneDNN keeps the convolutions' outputs in blocks, whose memory the loop's input would have."""

    def __init__(self, before: int = 20, behind: int = 4) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.before, self.behind = gluon.nn.HybridSequential(), gluon.nn.HybridSequential()
            for block in [self.before] * before + [self.behind] * behind:
                block.add(gluon.nn.Conv1D(64, 3, padding=1, in_channels=64))

    def hybrid_forward(self, F, x):  # noqa: N803
        rows = F.transpose(self.before(x), (2, 0, 1))
        step = lambda row, states: (F.tanh(row + states[0] * 0.5), [F.tanh(row)])  # noqa: E731
        start = [F.zeros_like(F.squeeze(F.slice_axis(rows, axis=0, begin=0, end=1), axis=0))]
        out, _ = F.contrib.foreach(step, rows, start)
        return self.behind(F.transpose(out, (1, 2, 0)))


def values(net: gluon.Block, data: mx.nd.NDArray, trains: bool) -> Iterator[np.ndarray]:
    """Yield the outputs and, if ``trains``, the gradients of a call."""
    if not trains:
        yield net(data).asnumpy()
        return
    with autograd.record():
        out = net(data).astype("float32")
        loss = (out * out).sum()
    loss.backward()
    yield out.asnumpy()
    yield from (param.grad().asnumpy() for param in net.collect_params().values())


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_loop_behind_convolutions_gives_the_same_numbers_in_each_call(policy, trains):
    net = LoopBehindConvolutions()
    net.initialize(mx.init.Xavier())
    data = mx.nd.array(np.random.RandomState(0).normal(0, 1, (4, 64, 40)))
    exact = list(values(net, data, trains))  # not hybridized: no tensors share memory
    mxmp.convert(net, policy)
    first, *others = [list(values(net, data, trains)) for _ in range(30)]
    for found, wanted in zip(first, exact):
        assert np.linalg.norm(found - wanted) <= 0.2 * np.linalg.norm(wanted)
    for other in others:
        assert_same(other, first)


def converted_loop() -> None:
    net = LoopBehindConvolutions(before=0, behind=1)  # so short that MXNet has nothing to read too early
    net.initialize()
    mxmp.convert(net, "bfloat16")(mx.nd.ones((1, 64, 4)))


@pytest.mark.slow
def test_a_served_loop_in_fp32_gives_the_same_numbers_in_each_call():
    net = LoopBehindConvolutions()
    net.initialize(mx.init.Xavier())
    data = mx.nd.array(np.random.RandomState(0).normal(0, 1, (4, 64, 40)))
    exact = net(data).asnumpy()
    served = mxmp.optimize_for_inference(net, [data], dtypes=())
    for _ in range(30):
        assert np.linalg.norm(served(data).asnumpy() - exact) <= 1e-4 * np.linalg.norm(exact)


def test_graphs_without_loops_may_share_memory_and_a_user_s_choice_stays(monkeypatch):
    trained("bfloat16", monkeypatch, True)
    assert MATCH_RANGE not in os.environ
    monkeypatch.setenv(MATCH_RANGE, "4")
    converted_loop()
    assert os.environ[MATCH_RANGE] == "4"


def test_a_machine_with_a_gpu_keeps_sharing_and_is_warned_once(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    _warn_of_shared_memory.cache_clear()
    with pytest.warns(UserWarning, match=f"{MATCH_RANGE}=0"):
        converted_loop()
    converted_loop()
    assert MATCH_RANGE not in os.environ
