"""Every operator and cast is timed, and the random numbers that follow are those that would have followed."""

from __future__ import annotations

import random

import mxnet as mx
import numpy as np
import pytest
from kit.measuring import SHAPE, a_net
from kit.oracle import S
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.precision.graph import Graph
from mxmp.tuning.choices import Task
from mxmp.tuning.clock import Arrays, Cast, Timed
from mxmp.tuning.search import without_waiting

pytestmark = pytest.mark.slow


def draws():
    with autograd.train_mode():
        found = [mx.nd.Dropout(mx.nd.ones(64), p=0.5), mx.nd.shuffle(mx.nd.arange(32))]
    found += [mx.nd.random.uniform(shape=8), mx.nd.random.normal(shape=8), mx.nd.random.randint(0, 1 << 20, shape=8)]
    return [*(array.asnumpy().tolist() for array in found), np.random.rand(), random.random()]


def seed():
    mx.random.seed(7)
    np.random.seed(7)
    random.seed(7)


class Net(gluon.HybridBlock):
    def __init__(self, **dropout):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first, self.last = nn.Dense(8), nn.Dense(3)
        self._dropout = dropout

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.last(F.Dropout(F.relu(self.first(x)), p=0.5, **self._dropout))


def a_block(**dropout):
    net = Net(**dropout)
    net.initialize()
    return lambda **how: mxmp.tune(net, (4, 6), cache=False, progress=False, **how)


def a_converted_block():
    net = mxmp.convert(Net())
    net.initialize()
    return lambda **how: mxmp.tune(net, (4, 6), cache=False, progress=False, **how)


def a_numpy_block():
    net = nn.HybridSequential(prefix="np_")
    net.add(nn.Dense(8), nn.Dropout(0.5), nn.Dense(3))

    def run(**how):
        with mx.util.np_shape(True), mx.util.np_array(True):
            net.initialize(force_reinit=True)
            seed()
            return mxmp.tune(net, (4, 6), cache=False, progress=False, **how)

    return run


def a_loop():
    """Its Dropout draws nothing from MXNet's generator in 1.9.1."""

    def body(x, state):
        out = S.Dropout(S.FullyConnected(x, num_hidden=4, name="fc"), p=0.5) + state
        return out, [out]

    out, _ = S.contrib.foreach(lambda x, s: body(x, s[0]), S.var("data"), [S.var("state")], name="loop_")
    out = S.FullyConnected(out, num_hidden=3, name="last")
    return lambda **how: mxmp.tune(out, data=(3, 2, 4), state=(2, 4), cache=False, progress=False, **how)


SUBJECTS = {
    "Dropout": a_block,
    "with axes": lambda: a_block(axes=(0,)),
    "always": lambda: a_block(mode="always"),
    "converted": a_converted_block,
    "NumPy": a_numpy_block,
    "in a loop": a_loop,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_drawn_after_a_tune_is_what_would_have_been_drawn(subject, training):
    tune = SUBJECTS[subject]()
    seed()
    expected = draws()
    seed()
    plan = tune(training=training)
    assert draws() == expected
    assert plan.tuned.steps
    assert "fails here" not in str(plan)


@pytest.mark.usefixtures("in_this_process")
def test_what_waiting_costs_is_taken_off_each_operator_alike():
    found = without_waiting({"a": 10.0, "b": 4.0, "c": 1.0}, {"a": 1, "b": 2, "c": 1}, step=11.0)
    assert found == pytest.approx({"a": 9.0, "b": 2.0, "c": 0.0})
    assert without_waiting({"a": 1.0}, {"a": 1}, step=2.0) == {"a": 1.0}
    assert sum(without_waiting({"a": 9.0, "b": 0.1}, {"a": 1, "b": 5}, step=3.0).values()) == pytest.approx(3, rel=0.01)


@pytest.mark.usefixtures("in_this_process")
def test_every_operator_and_cast_of_a_plan_is_timed():
    net = a_net(shaped=True)
    graph = Graph.from_symbol(net(mx.sym.var("data")))
    task = Task(graph, mxmp.Policy("bfloat16"), "cpu")
    names = [n for n in graph.to_symbol().list_arguments() if n != "data"]
    arrays = Arrays(graph, mx.cpu(), dict.fromkeys(names, "write"), {}, {"data": SHAPE})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        found = Timed(graph, task.plan(low, {}), arrays, True).profile()
        assert {owner for owner in found if not isinstance(owner, Cast)} == {n for n in task.names if not n.is_variable}
        assert {tuple(owner) for owner in found if isinstance(owner, Cast)} == set(task.choice.casts(low))
        assert all(seconds > 0 for seconds in found.values())


def of_a_step(policy, **options):
    """A training step of ``a_net`` in which all is low that may be, and its arrays."""
    graph = Graph.from_symbol(a_net(shaped=True)(mx.sym.var("data")))
    names = [n for n in graph.to_symbol().list_arguments() if n != "data"]
    arrays = Arrays(graph, mx.cpu(), dict.fromkeys(names, "write"), {}, {"data": SHAPE}, **options)
    task = Task(graph, mxmp.Policy(policy), "cpu", parameters=names, learned=names)
    return Timed(graph, task.plan(task.may_be_low, {}), arrays, True), arrays


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_whole_step_copies_a_batch_and_updates_what_no_other_plan_reads(policy):
    timed, arrays = of_a_step(policy)
    before = {name: array.asnumpy() for name, array in arrays.arguments.items()}
    assert arrays.optimizer_states == {}
    arrays.arguments["data"][:] = 0
    for gradient in arrays.gradients.values():
        gradient[:] = 0
    assert timed.rest_of_step() > 0
    assert not any(gradient.asnumpy().any() for gradient in arrays.gradients.values())
    assert timed.whole_step() > 0
    assert all(gradient.asnumpy().any() for gradient in arrays.gradients.values())
    assert len(arrays.optimizer_states) == len(arrays.gradients)
    for name, array in arrays.arguments.items():
        assert (array.asnumpy() == before[name]).all()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 1), ("adam", 2), ("lamb", 2), ("signum", 1), ("sgld", 0)])
def test_a_whole_step_updates_by_the_optimizer_that_was_named(optimizer, states):
    timed, arrays = of_a_step("bfloat16", optimizer=optimizer)
    timed.whole_step()
    for state in arrays.optimizer_states.values():
        arrays_of_it = [each for each in (state if isinstance(state, tuple) else (state,)) if each is not None]
        assert len(arrays_of_it) == states
        assert all(each.asnumpy().any() for each in arrays_of_it)
