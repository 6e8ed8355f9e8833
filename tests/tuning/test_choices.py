"""A plan is as safe as the rules: it rounds nothing that they would not round."""

from __future__ import annotations

import sys

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from kit.blocks import Lambda
from kit.examples import examples
from kit.graphs import graphs
from kit.oracle import S, by_symbol, filled
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.operators import Options
from mxmp.precision.rules import RULES
from mxmp.tuning.choices import Task

POLICIES = [("float16", "cpu"), ("float16", "gpu"), ("bfloat16", "cpu"), ("bfloat16,norm=compute", "cpu")]


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_what_is_free_is_low_by_the_rules_given_the_kernels_or_moves_values_to_what_is(drawn):
    graph = strip(Graph.from_symbol(drawn[0]))
    names, readers = graph.names(), {}
    for entry, users in graph.consumers().items():
        readers.setdefault(entry.node, []).extend(user for user, _ in users)
    for text, device in POLICIES:
        policy = Policy.parse(text)
        ideal = decide(graph, policy, device, Options(any_kernel=True)).decisions
        for slow_too in (False, True):
            task = Task(graph, policy, device, slow_too=slow_too)
            assert task.low_nodes(task.rules_plan) <= task.may_be_low
            most = task.plan(task.may_be_low, {})
            safe = {node for node, name in names.items() if not node.is_variable and ideal[name].low}
            for node in reversed(list(graph.nodes())):
                if not node.is_variable and most.decisions[names[node]].low and node not in safe:
                    assert RULES[node.op].exact
                    assert readers[node]
                    assert safe.issuperset(readers[node])
                    safe.add(node)


@pytest.mark.slow
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck), deadline=None)
@given(graphs())
def test_operators_that_move_values_to_low_ones_change_no_bit(drawn):
    symbol, shapes = drawn
    graph = strip(Graph.from_symbol(symbol))
    task = Task(graph, Policy("float16", params="float32"), "cpu", keep_output_names=True)
    ideal, values = (
        decide(graph, task.policy, "cpu", Options(any_kernel=True, keep_output_names=True)),
        filled(symbol, **shapes),
    )
    by_rules = {node for node in task.may_be_low if ideal.decisions[task.names[node]].low}
    moved = task.may_be_low
    assume(by_rules)
    outputs = [
        by_symbol(mxmp.cast_symbol(symbol, task.plan(low, {}), ctx=mx.cpu()), values).outputs
        for low in (by_rules, moved)
    ]
    for one, other in zip(*outputs):
        np.testing.assert_array_equal(one, other)


KELVIN = (lambda f, x: (x - 288) / 0.3, 288, 0.3)
SECONDS = (lambda f, x: (x - 43200) / 43200, 43200, 25000)  # up to a day, which float16 does not hold
PRESSURE = (lambda f, x: (x - 1013) / 10, 1013, 10)
JOINED = (lambda f, x: f.concat(f.slice_axis(x, axis=1, begin=0, end=2) - 288, x / 288, dim=1), 288, 0.3)
LIMITED = (lambda f, x: f.clip(x, 287.9, 288.2) - 288, 288, 0.3)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("scale", "mean", "deviation"),
    [KELVIN, SECONDS, PRESSURE, JOINED, LIMITED],
    ids=["kelvin", "seconds", "pressure", "joined", "limited"],
)
def test_data_are_normalized_before_a_plan_rounds_them(scale, mean, deviation, policy):
    rng = np.random.RandomState(0)
    x = mx.nd.array(rng.uniform(mean - deviation, mean + 1.7 * deviation, (64, 3)))
    net = Lambda(lambda f, net, x: net.dense(scale(f, x)), dense=nn.Dense(4))
    net.initialize(mx.init.Xavier())
    want = net(x).asnumpy()
    mxmp.convert(net, mxmp.tune(net, x, policy=policy, measure=False))
    error = np.abs(net(x).astype("float32").asnumpy() - want).max() / np.abs(want).max()
    assert error < (0.002 if policy == "float16" else 0.015)


def test_a_batch_norm_of_data_stays_in_fp32_whatever_is_measured():
    data = S.BatchNorm(S.reshape(S.var("data"), shape=(0, -1), name="flat"), name="norm")
    graph = Graph.from_symbol(S.FullyConnected(data, num_hidden=4, name="fc"))
    for slow_too in (False, True):
        task = Task(graph, Policy.parse("bfloat16,norm=compute"), "cpu", slow_too=slow_too)
        assert {node.name for node in task.may_be_low} == {"fc"}


def test_what_fp32_readers_need_stays_in_fp32():
    p = S.sigmoid(S.FullyConnected(S.var("data"), num_hidden=4, name="fc"), name="p")
    graph = Graph.from_symbol(S.log(1 - S.reshape(p, shape=(-1,), name="flat")))
    for text in ("float16", "bfloat16"):
        assert {node.name for node in Task(graph, Policy(text), "cpu", slow_too=True).may_be_low} == {"fc"}


def test_operators_behind_a_missing_kernel_are_free_where_only_the_kernel_kept_them_in_fp32():
    x = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    x = S.relu(
        S.broadcast_mul(x, S.FullyConnected(S.var("data"), num_hidden=1, name="gate"), name="gated"), name="relu"
    )
    task = Task(Graph.from_symbol(S.FullyConnected(x, num_hidden=4, name="last")), Policy("bfloat16"), "cpu")
    assert not task.rules_plan.decisions["relu"].low
    assert {node.name for node in task.may_be_low} == {"fc", "gate", "relu", "last"}


def small_resnet() -> gluon.HybridBlock:
    from mxnet.gluon.model_zoo.vision import ResNetV1
    from mxnet.gluon.model_zoo.vision.resnet import BasicBlockV1

    return ResNetV1(BasicBlockV1, [1, 1], [8, 8, 16], classes=10, thumbnail=True)


def casts(net: gluon.HybridBlock, how: object) -> list[int]:
    symbol = net(S.var("data"))
    shapes = {"data": (4, 3, 16, 16)}
    return [
        cast.bytes
        for graph in mxmp.diagnose.explain(symbol, policy=how, ctx=mx.gpu(), **shapes).graphs
        for cast in graph.casts
    ]


def test_a_plan_for_a_gpu_does_not_pay_for_casts_inside_its_kernel_of_batch_norm():
    net = small_resnet()
    net.initialize()
    plan = mxmp.tune(net(S.var("data")), data=(4, 3, 16, 16), policy="float16", measure=False, ctx=mx.gpu())
    by_plan, by_rules = casts(net, plan), casts(net, "float16")
    assert sum(by_plan) <= sum(by_rules)
    assert plan.tuned.cast_bytes == {"rules": sum(by_rules), "fewest bytes cast": sum(by_plan)}
    norms = [decision for decision in plan.decisions.values() if decision.op == "BatchNorm"]
    assert norms
    assert not any(norm.low for norm in norms)


def test_a_plan_is_for_where_the_parameters_or_the_inputs_are(monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules["mxmp.tuning.tune"], "job_of", lambda *args: seen.append(args[4]) or 1 / 0)
    net, x = nn.Dense(2), mx.nd.ones((2, 3), ctx=mx.cpu(2))
    with pytest.raises(ZeroDivisionError):
        mxmp.tune(net, [x], measure=False)
    net.initialize(ctx=mx.cpu(1))
    for arguments in ({}, {"ctx": mx.cpu(3)}):
        with pytest.raises(ZeroDivisionError):
            mxmp.tune(net, x, measure=False, **arguments)
    with pytest.raises(ZeroDivisionError):
        mxmp.tune(net(S.var("data")), data=x, measure=False)
    assert seen == [mx.cpu(2), mx.cpu(1), mx.cpu(3), mx.cpu(2)]


@pytest.mark.parametrize("measure", [False, True])
def test_bfloat16_for_a_net_on_a_gpu_is_refused_at_once(monkeypatch, measure):
    net = nn.Dense(2)
    monkeypatch.setattr("mxmp.tuning.job.contexts", lambda param: [mx.gpu(0)])
    with pytest.raises(ValueError, match="no bfloat16 kernels for a GPU"):
        mxmp.tune(net, (2, 3), measure=measure)
