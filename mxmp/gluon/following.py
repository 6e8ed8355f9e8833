"""Lets the graph of a block follow the scopes of autograd in its code, which ``Scopes`` has marked."""

from __future__ import annotations

from typing import Callable, Mapping

from mxnet.gluon import HybridBlock

from ..precision.graph import Entry, Graph, Node
from ..precision.subgraphs import bodies, set_bodies
from . import _mxnet
from .scopes import PAUSED, TRAINING


def follow(clone: HybridBlock, recording: bool) -> frozenset[str]:
    """Let the graph of a traced block compute what its code says, called while autograd is ``recording``, or not.
    Return the names of variables that the code reads in ``pause`` alone. Raises ``ValueError`` where no graph can."""
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    graph = Graph.from_symbol(symbol)
    _follow(graph, recording)
    paused = frozenset(node.name for node in graph.nodes() if node.is_variable) - _reached(graph)
    _unmark(graph)
    _mxnet.set_traced_graph(clone, traced._replace(graph=(data, graph.to_symbol())))
    return paused


def marked(block: HybridBlock, marks: Mapping[str, str]) -> HybridBlock:
    """Return a copy of a SymbolBlock, whose operators were made before the trace, with ``marks`` on them."""
    clone = _mxnet.copied(block)
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    graph = Graph.from_symbol(symbol)
    _mark(graph, marks)
    _mxnet.set_traced_graph(clone, traced._replace(graph=(data, graph.to_symbol())))
    return clone


def _mark(graph: Graph, marks: Mapping[str, str]) -> None:
    for node in graph.nodes():
        if node.op != "Custom":
            node.attrs.update(marks)
        inner = [body.graph for body in bodies(node)]
        for each in inner:
            _mark(each, marks)
        set_bodies(node, inner)
    for position, head in enumerate(graph.heads):
        if head.node.op == "Custom":
            graph.heads[position] = Entry(Node("_copy", f"{head.node.name}_{position}", {**marks}, [head]))


def _unmark(graph: Graph) -> None:
    for node in graph.nodes():
        for mark in (PAUSED, TRAINING):
            node.attrs.pop(mark, None)
        inner = [body.graph for body in bodies(node)]
        for each in inner:
            _unmark(each)
        set_bodies(node, inner)


def _reached(graph: Graph) -> set[str]:
    """Return the names of the variables that a backward from the outputs reaches."""
    found: set[str] = set()
    seen: set[Node] = set()
    todo = [entry.node for entry in graph.heads]
    while todo:
        node = todo.pop()
        if node in seen or (node.op == "BlockGrad" and PAUSED in node.attrs):
            continue
        seen.add(node)
        if node.is_variable:
            found.add(node.name)
        inner = [(body.positions, _reached(body.graph)) for body in bodies(node) if not body.steers]
        read = {at for positions, names in inner for each, at in positions.items() if each.name in names}
        todo += [entry.node for at, entry in enumerate(node.inputs) if at in read or not inner]
    return found


def _follow(graph: Graph, recording: bool, *, is_body: bool = False, is_paused: bool = False) -> None:
    for node in graph.nodes():
        inner = [body.graph for body in bodies(node)]
        for each in inner:
            _follow(each, recording, is_body=True, is_paused=PAUSED in node.attrs)
        set_bodies(node, inner)
        if PAUSED in node.attrs and node.op in _NORMS:
            node.attrs["momentum"] = "1"  # its backward would move the running statistics
        if TRAINING in node.attrs and node.op in _IN_MODE:
            training = node.attrs[TRAINING] == "1"
            is_inside = recording or is_body
            if not (_IN_MODE[node.op](node, training) or (not is_inside and _uses_statistics_of_batch(node))):
                raise ValueError(
                    f"{node.name!r} ({node.op}) is in autograd.{'train' if training else 'predict'}_mode(), and a "
                    "graph around it in the other mode does not follow"
                )
    if not is_paused:  # of such a loop MXNet could not compute any gradient
        _stop_gradients(graph)


def _stop_gradients(graph: Graph) -> None:
    """Pass on no gradient to what was computed in ``pause``, in place."""
    stopped: dict[Entry, Entry] = {}
    statistics = set(graph.to_symbol().list_auxiliary_states())

    def stop(entry: Entry) -> Entry:
        if entry not in stopped:
            name = f"{entry.node.name}_paused{entry.index or ''}"
            stopped[entry] = Entry(Node("BlockGrad", name, {PAUSED: "1"}, [entry]))
        return stopped[entry]

    def behind(entry: Entry) -> Entry:
        return entry if PAUSED not in entry.node.attrs or entry.node.is_variable else stop(entry)

    for node in graph.nodes():
        if PAUSED not in node.attrs and any(behind(each) is not each for each in node.inputs):
            node.inputs = map(behind, node.inputs)
        elif PAUSED in node.attrs and node.subgraphs:
            # Where heads are zero, MXNet's gradients of control flow may be what was in memory.
            node.inputs = [each if each.node.name in statistics else stop(each) for each in node.inputs]
    graph.heads = list(map(behind, graph.heads))


# -- operators that depend on the mode: each returns whether it can be set for ``training`` ------------


def _set_dropout(node: Node, training: bool) -> bool:
    if training:
        node.attrs["mode"] = "always"
    elif node.attrs.get("mode") != "always":
        node.op, node.attrs = "_copy", {name: text for name, text in node.attrs.items() if name[:2] == "__"}
    return True


def _set_norm(node: Node, training: bool) -> bool:
    if not training:
        node.attrs["use_global_stats"] = "True"
    return not training or node.attrs.get("use_global_stats") in ("True", "1")


def _set_recurrent(node: Node, training: bool) -> bool:
    drops = float(node.attrs.get("p", "0")) > 0
    if not training:
        node.attrs.pop("p", None)
    return not (training and drops)


def _is_fixed(node: Node, training: bool) -> bool:
    return node.attrs.get("act_type") != "rrelu"


_NORMS = ("BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm")
_IN_MODE: dict[str, Callable[[Node, bool], bool]] = {
    **dict.fromkeys(_NORMS, _set_norm),
    "Dropout": _set_dropout,
    "RNN": _set_recurrent,
    "LeakyReLU": _is_fixed,
}


def _uses_statistics_of_batch(node: Node) -> bool:
    """Let a BatchNorm compute as an InstanceNorm does with the channels first; return whether the node was one."""
    if node.op not in _NORMS or "output_mean_var" in node.attrs:
        return False
    x, gamma, beta = node.inputs[:3]
    marks = {name: text for name, text in node.attrs.items() if name in (PAUSED, TRAINING)}
    swap = {"dim1": "0", "dim2": node.attrs.get("axis", "1")}

    def made(op: str, name: str, *inputs: Entry, **attrs: str) -> Entry:
        return Entry(Node(op, f"{node.name}_{name}", {**attrs, **marks}, inputs))

    if node.attrs.get("fix_gamma", "True") in ("True", "1"):
        gamma = made("ones_like", "ones", gamma)
    batch = made("expand_dims", "batch", made("SwapAxis", "channels_first", x, **swap), axis="0")
    normed = made("InstanceNorm", "normed", batch, gamma, beta, eps=node.attrs.get("eps", "0.001"))
    back = Node("SwapAxis", f"{node.name}_back", {**swap, **marks}, [made("squeeze", "squeezed", normed, axis="0")])
    node.op, node.attrs, node.inputs = "relu" if "ReLU" in node.op else "_copy", marks, [Entry(back)]
    return True
