"""The graph: what it reads it writes, in MXNet's own order, at any size."""

from __future__ import annotations

import json

import mxnet as mx
import pytest

from mxmp.precision.graph import Entry, Graph, Node


def var(name: str, **kwargs) -> mx.sym.Symbol:
    return mx.sym.var(name, **kwargs)


def conv_net() -> mx.sym.Symbol:
    x = mx.sym.Convolution(var("data"), kernel=(3, 3), num_filter=4, name="conv")
    x = mx.sym.BatchNorm(x, name="bn", fix_gamma=False)
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3, name="fc"), name="softmax")


def tied() -> mx.sym.Symbol:
    weight = var("weight", lr_mult=0.5, shape=(4, 4))
    x = mx.sym.FullyConnected(var("data"), weight, no_bias=True, num_hidden=4, name="one")
    return mx.sym.FullyConnected(x, weight, no_bias=True, num_hidden=4, name="two")


def several_outputs() -> mx.sym.Symbol:
    parts = mx.sym.SliceChannel(var("data"), num_outputs=3, name="split")
    return mx.sym.Group([parts[2], mx.sym.relu(parts[0], name="relu"), parts[2]])


def foreach() -> mx.sym.Symbol:
    weight = var("weight")

    def body(item, state):
        new = mx.sym.dot(item, weight) + state
        return new, new

    outs, last = mx.sym.contrib.foreach(body, mx.sym.relu(var("data")), var("state"), name="loop")
    return mx.sym.Group([outs, last])


def while_loop() -> mx.sym.Symbol:
    outs, last = mx.sym.contrib.while_loop(
        cond=lambda i, total: i <= 5,
        func=lambda i, total: ([total], [i + 1, total + i]),
        loop_vars=[var("i"), var("total")],
        max_iterations=10,
    )
    return mx.sym.Group([*outs, *last])


def cond() -> mx.sym.Symbol:
    a, b = var("a"), var("b")
    return mx.sym.contrib.cond(a < b, lambda: mx.sym.dot(a, b), lambda: a - b)


def numpy_kind() -> mx.sym.Symbol:
    return mx.sym.np.exp(mx.sym.np.dot(var("data").as_np_ndarray(), var("other").as_np_ndarray()))


CONTROL_FLOW = [foreach, while_loop, cond]
NETS = [conv_net, tied, several_outputs, numpy_kind, *CONTROL_FLOW]


def as_data(symbol: mx.sym.Symbol) -> dict:
    """The JSON of a Symbol, less ``node_row_ptr``, which MXNet recomputes."""
    raw = json.loads(symbol.tojson(remove_amp_cast=False))
    raw.pop("node_row_ptr", None)
    return raw


@pytest.mark.parametrize("build", NETS)
def test_a_graph_writes_the_json_that_mxnet_wrote(build):
    symbol = build()
    written = json.loads(Graph.from_symbol(symbol).to_json())
    assert written == as_data(symbol)
    again = Graph.from_symbol(symbol).to_symbol()
    assert as_data(again) == as_data(symbol)
    assert type(again) is type(symbol)


def test_reading_leaves_the_symbol_alone():
    symbol = conv_net()
    before = symbol.tojson()
    graph = Graph.from_symbol(symbol)
    for node in graph.nodes():
        node.name, node.attrs = "x", {}
    assert symbol.tojson() == before


def test_tied_variables_are_one_node_with_all_its_readers():
    graph = Graph.from_symbol(tied())
    weight = next(n for n in graph.nodes() if n.name == "weight")
    assert [(n.name, i) for n, i in graph.consumers()[Entry(weight)]] == [("one", 1), ("two", 1)]
    assert weight.attrs == {"__lr_mult__": "0.5", "__shape__": "(4, 4)"}


def test_control_dependencies_are_walked_and_written():
    first, second = Node("null", "first"), Node("null", "second")
    node = Node("relu", "relu", inputs=[Entry(second)], control_deps=[first])
    graph = Graph([Entry(node)])
    assert [n.name for n in graph.nodes()] == ["second", "first", "relu"]
    again = Graph.from_json(graph.to_json())
    assert [n.name for n in next(n for n in again.nodes() if n.op == "relu").control_deps] == ["first"]


def test_a_chain_of_20000_nodes_needs_no_recursion():
    node = Node("null", "data")
    for index in range(20_000):
        node = Node("relu", f"relu{index}", inputs=[Entry(node)])
    graph = Graph([Entry(node)])
    assert sum(1 for _ in graph.nodes()) == 20_001
    again = Graph.from_json(graph.to_json())
    assert [n.name for n in again.nodes()] == [n.name for n in graph.nodes()]


def test_names_are_unique_and_the_first_keeps_its_own():
    x = mx.sym.var("x")
    for name in ("a", "a:1", "a", "a", "b"):
        x = mx.sym.relu(x, name=name)
    assert list(Graph.from_symbol(x).names().values()) == ["x", "a", "a:1", "a:2", "a:3", "b"]


def test_the_order_is_kept_until_a_node_or_an_output_changes():
    x, y = Node("null", "x"), Node("null", "y")
    relu = Node("relu", "relu", inputs=[Entry(x)])
    graph, same = Graph([Entry(relu)]), Graph([Entry(relu)])
    assert graph.nodes() is graph.nodes()
    assert graph.readers() is graph.readers()
    before, read = graph.nodes(), graph.consumers()
    relu.rewire(0, Entry(y))
    assert graph.nodes() == same.nodes() == (y, relu)  # of every graph with this node
    assert graph.consumers() == {Entry(y): [(relu, 0)]}
    assert graph.readers() == {y: [(relu, 0)]}
    assert (before, read) == ((x, relu), {Entry(x): [(relu, 0)]})  # what was returned stays
    relu.inputs = [Entry(x)]
    assert graph.nodes() == (x, relu)
    x.control_deps = [y]
    assert graph.nodes() == (y, x, relu)
    graph.heads[0] = Entry(x)
    assert graph.nodes() == (y, x)
    graph.heads = [Entry(y)]
    assert graph.nodes() == (y,)


def test_inputs_change_only_where_graphs_notice_it():
    relu = Node("relu", "relu", inputs=[Entry(Node("null", "x"))], control_deps=[Node("null", "y")])
    for entries in (relu.inputs, relu.control_deps):
        assert isinstance(entries, tuple)
    assert not hasattr(relu, "__dict__")
