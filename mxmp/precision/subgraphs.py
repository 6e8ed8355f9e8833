"""The bodies of control flow (``foreach``, ``while_loop``, ``cond``): graphs in a node, with inputs of their own."""

from __future__ import annotations

import json
from ast import literal_eval
from typing import Iterator, NamedTuple

from .graph import Entry, Graph, Node

__all__ = ["Body", "bodies", "set_bodies"]


class Body(NamedTuple):
    """One graph of a control-flow node.

    Attributes
    ----------
    role : str
        What stands between the node's name and those of the body's nodes: ``loop/fc``, ``branch/then/fc``.
    graph : Graph
    steers : bool
        It says how often or which way the program goes; its output is a condition.
    outer : dict of Node to Entry
        For each variable of the body, the node's input that it gets its value from.
    """

    role: str
    graph: Graph
    steers: bool
    outer: dict[Node, Entry]

    def prefix(self, name: str) -> str:
        """Return what precedes the names of the body's nodes if the control-flow node is called ``name``."""
        return f"{name}/{self.role}"


_ROLES = {
    "_foreach": [("", False)],
    "_while_loop": [("while/", True), ("", False)],
    "_cond": [("if/", True), ("then/", False), ("else/", False)],
}
# Which of the node's inputs each variable of the body is; foreach says it the other way round.
_INPUTS = {
    "_while_loop": ["cond_input_locs", "func_input_locs"],
    "_cond": ["cond_input_locs", "then_input_locs", "else_input_locs"],
}


def bodies(node: Node) -> Iterator[Body]:
    """The bodies of a node, none where it is no control flow that we know."""
    if node.op not in _ROLES or not node.subgraphs:
        return
    for number, ((role, steers), raw) in enumerate(zip(_ROLES[node.op], node.subgraphs)):
        graph = Graph.from_json(json.dumps(raw))
        outer = zip(_variables(graph), _positions(node, number))
        yield Body(role, graph, steers, {variable: node.inputs[position] for variable, position in outer})


def set_bodies(node: Node, graphs: list[Graph]) -> None:
    """Give a node other bodies, with the same variables.

    Raises
    ------
    RuntimeError
        Their order is another: the node's attributes go by it.
    """
    for raw, graph in zip(node.subgraphs or (), graphs):
        before, after = ([v.name for v in _variables(g)] for g in (Graph.from_json(json.dumps(raw)), graph))
        if before != after:
            raise RuntimeError(f"{node.name}: the variables of a body were {before}, and are {after}")
    node.subgraphs = [json.loads(graph.to_json()) for graph in graphs]


def _variables(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes() if node.is_variable]


def _positions(node: Node, number: int) -> list[int]:
    if node.op == "_foreach":
        places = [p for key in ("in_data_locs", "in_state_locs", "remain_locs") for p in _numbers(node, key)]
        return sorted(range(len(places)), key=places.__getitem__)
    return _numbers(node, _INPUTS[node.op][number])


def _numbers(node: Node, key: str) -> list[int]:
    return [int(n) for n in literal_eval(node.attrs.get(key, "[]"))]
