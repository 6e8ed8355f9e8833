"""What tune is given, as data: nets, Symbols, arrays and shapes."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.measuring import two
from kit.oracle import S
from mxnet.gluon import nn

import mxmp
from mxmp.precision.graph import Graph
from mxmp.tuning import clock
from mxmp.tuning.choices import Task
from mxmp.tuning.clock import Arrays, Timed

pytestmark = pytest.mark.usefixtures("in_this_process")


def test_a_symbol_is_tuned_by_named_shapes_or_arrays():
    fc = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    symbol = S.SoftmaxOutput(S.FullyConnected(S.relu(fc), num_hidden=3, name="out"), name="softmax")
    plan = mxmp.tune(symbol, data=(2, 6), cache=False)
    assert set(mxmp.tune(symbol, data=mx.nd.ones((2, 6)), cache=False, training=False).decisions) == set(plan.decisions)
    assert mxmp.cast_symbol(symbol, plan).list_arguments() == symbol.list_arguments()


@pytest.mark.parametrize(("size", "large"), [(8, True), (2, False)])
def test_a_block_is_timed_without_what_its_sizes_do_not_need_and_a_symbol_with_it(size, large, monkeypatch):
    made = []

    def arrays(*args):
        made.append(Arrays(*args))
        return made[-1]

    monkeypatch.setattr(clock, "Arrays", arrays)
    net = nn.Conv2D(8, 5, padding=2, in_channels=4)
    net.initialize()
    shape = (2, 4, size, size)
    mxmp.tune(net, shape, cache=False)
    mxmp.tune(net(mx.sym.var("data")), data=shape, cache=False)
    assert [each.large_inputs for each in made] == [large, False]
    graph = Graph.from_symbol(net(mx.sym.var("data")))
    task = Task(graph, mxmp.Policy("bfloat16"), "cpu")
    emitted = [sum(Timed(graph, task.plan(task.may_be_low, {}), each, True).operators.values()) for each in made]
    assert (emitted[0] < emitted[1]) == large


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "igraph", None)
    with pytest.raises(ImportError, match=r"pip install 'mxmp\[tune\]'"):
        mxmp.tune(two(), data=(2, 6), measure=False)
