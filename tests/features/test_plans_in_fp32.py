"""A plan in which nothing computes low runs the FP32 graph as it is, but for what is needed to be right."""

from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.hook import hook_of
from mxmp.host.versions import NOW
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision
from mxmp.precision.tuned import CONVERTED, FULL, Tuned
from mxmp.tuning.choices import Task


class Net(gluon.HybridBlock):
    """ReLU6, a depthwise convolution, a grouped one with blocks of 4 channels, BatchNorm, a sigmoid, a difference."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = nn.Conv2D(24, 3, padding=1)
            self.norm = nn.BatchNorm()
            self.depthwise = nn.Conv2D(24, 3, padding=1, groups=24)
            self.grouped = nn.Conv2D(16, 5, padding=2, groups=4)
            self.last = nn.BatchNorm()
            self.dense = nn.Dense(5)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = F.clip(self.norm(self.first(x)), 0, 6)
        x = x * F.sigmoid(self.depthwise(x)) - F.clip(x, -1, 1)
        return self.dense(F.tanh(self.last(self.grouped(x))))


def a_net() -> Net:
    mx.random.seed(3)
    net = Net()
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 8, 8)))
    return net


def fp32(symbol: mx.sym.Symbol, chosen: str = FULL, **options) -> mxmp.Plan:
    """The plan that ``tune`` returns where nothing in low precision pays."""
    plan = Task(Graph.from_symbol(symbol), mxmp.Policy("bfloat16"), "cpu", **options).plan(frozenset(), {})
    assert plan.num_low == 0
    return replace(plan, tuned=Tuned(chosen, True))


def plan_of(net: Net, chosen: str = FULL) -> mxmp.Plan:
    with autograd.train_mode(), mx.name.NameManager():
        symbol = net(S.var("data"))
    return fp32(symbol, chosen, parameters=list(net.collect_params()))


def operators(symbol: mx.sym.Symbol) -> list:
    """Type, parameters and inputs of every node: what runs, whatever the names."""
    nodes = list(Graph.from_symbol(symbol).nodes())
    number = {node: i for i, node in enumerate(nodes)}
    return [(n.op, n.attrs, [(number[e.node], e.index) for e in n.inputs]) for n in nodes]


def test_a_converted_net_has_the_graph_and_the_bits_of_an_unconverted_one():
    nets = [a_net(), mxmp.convert(a_net(), plan_of(a_net()))]
    nets[0].hybridize()
    x = mx.nd.array(np.random.RandomState(5).normal(0, 1, (4, 3, 8, 8)))
    trainers = [gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}) for net in nets]
    for _ in range(3):
        outs = []
        for net, trainer in zip(nets, trainers):
            with autograd.record():
                outs.append(net(x))
                loss = (outs[-1] ** 2).mean()
            loss.backward()
            trainer.step(1)
        np.testing.assert_array_equal(*(out.asnumpy() for out in outs))
    for one, other in zip(*(net.collect_params().values() for net in nets)):
        np.testing.assert_array_equal(one.data().asnumpy(), other.data().asnumpy())
        assert one.dtype == other.dtype
    (built,) = hook_of(nets[1]).graphs.values()
    with autograd.train_mode():
        assert operators(built.op.symbol) == operators(a_net()(S.var("data")))


def test_a_cast_symbol_is_the_symbol():
    """Without a bias: a Symbol does not say that its weights will be trained, without which a bias is not either."""
    conv = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, num_group=2, no_bias=True, name="conv")
    fc = S.FullyConnected(S.clip(conv, 0, 6, name="clip"), num_hidden=3, no_bias=True, name="fc")
    symbol = S.SoftmaxOutput(fc, name="softmax")
    cast = mxmp.cast_symbol(symbol, fp32(symbol, keep_output_names=True))
    assert cast.tojson(remove_amp_cast=False) == symbol.tojson(remove_amp_cast=False)


def test_what_was_measured_to_be_faster_is_kept():
    net = mxmp.convert(a_net(), plan_of(a_net(), CONVERTED))
    with autograd.record():
        net(mx.nd.zeros((1, 3, 8, 8)))
    assert "clip_by_bounds" in mxmp.explain(net).graphs[0].workarounds
    (built,) = hook_of(net).graphs.values()
    assert "clip" not in [op for op, _, _ in operators(built.op.symbol)]


def test_workarounds_without_which_fp32_fails_or_is_wrong_are_kept():
    x = S.Convolution(S.var("data"), kernel=(5, 5, 5), pad=(2, 2, 2), num_filter=4, no_bias=True, name="conv")
    symbol = S.clip(S.BatchNorm(x, name="norm"), 0, 6, name="clip")
    (report,) = mxmp.explain(symbol, policy=fp32(symbol, keep_output_names=True)).graphs
    needed = {"padded_volumes"} if NOW.trains_norms_of_volumes else {"volume_norms", "padded_volumes"}
    assert set(report.workarounds) == needed


def test_the_body_of_a_loop_is_as_its_network_is():
    def body(x, state):
        out = S.clip(S.FullyConnected(x, num_hidden=4, name="fc"), 0, 6, name="clip") + state
        return out, [out]

    out, _ = S.contrib.foreach(lambda x, s: body(x, s[0]), S.var("data"), [S.var("state")], name="loop_")
    symbol = S.FullyConnected(out, num_hidden=3, name="last")
    for chosen, computed in ((FULL, "clip"), (CONVERTED, "_minimum_scalar")):
        cast = mxmp.cast_symbol(symbol, fp32(symbol, chosen, keep_output_names=True))
        (loop,) = (node for node in Graph.from_symbol(cast).nodes() if node.op == "_foreach")
        (clip,) = (node for node in loop.subgraphs[0]["nodes"] if node["name"].endswith("clip"))
        assert clip["op"] == computed


def test_rules_that_leave_everything_in_fp32_leave_the_graph_as_it_is():
    net = mxmp.convert(a_net(), "bfloat16", exclude=["*conv*", "*dense*"])
    with pytest.warns(UserWarning, match="computes in bfloat16"), autograd.record():
        net(mx.nd.zeros((1, 3, 8, 8)))
    (built,) = hook_of(net).graphs.values()
    with autograd.train_mode():
        assert operators(built.op.symbol) == operators(a_net()(S.var("data")))


def test_a_decision_by_hand_brings_the_workarounds_back():
    symbol = S.clip(S.FullyConnected(S.var("data"), num_hidden=4, name="fc"), 0, 6, name="clip")
    plan = fp32(symbol, keep_output_names=True)
    low = replace(plan, decisions={**plan.decisions, "fc": Decision("FullyConnected", True, "by hand")})
    assert "clip" not in [op for op, _, _ in operators(mxmp.cast_symbol(symbol, low))]
    assert "clip" in [op for op, _, _ in operators(mxmp.cast_symbol(symbol, plan))]
