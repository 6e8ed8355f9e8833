"""Reads and replaces the bodies of control flow (``foreach``, ``while_loop``, ``cond``): graphs inside a node."""

from __future__ import annotations

import json
from ast import literal_eval
from typing import Iterator, Mapping, NamedTuple

import mxnet as mx

from .graph import Entry, Graph, Node


class Body(NamedTuple):
    """One of the graphs that a control-flow node runs: a loop's body or condition, or a branch of ``cond``."""

    role: str  # "", "while/", "if/", "then/" or "else/": see ``prefix``
    graph: Graph  # a copy: ``set_bodies`` writes a changed one into the node
    steers: bool  # computes whether a loop goes on, or which branch runs
    positions: dict[Node, int]  # of the node's input that each variable stands for
    # Variables that a foreach may read in another dtype: data and weights, not states, whose dtype the body returns.
    castable: set[Node]

    def prefix(self, name: str) -> str:
        """Return how a plan's names for the body's nodes begin: ``"loop/"``, or ``"a/then/"`` in a branch."""
        return f"{name}/{self.role}"


# For each body, in MXNet's order: ``Body.role`` and ``Body.steers``.
_ROLES = {
    "_foreach": [("", False)],
    "_while_loop": [("while/", True), ("", False)],
    "_cond": [("if/", True), ("then/", False), ("else/", False)],
}
# For each body, the attribute with the position of the node's input that each variable of the body stands for. foreach
# has other attributes: see ``_positions``.
_INPUTS = {
    "_while_loop": ["cond_input_locs", "func_input_locs"],
    "_cond": ["cond_input_locs", "then_input_locs", "else_input_locs"],
}
# For each body, the attributes that number its variables, in the order of ``_variables``.
_PLACES: dict[str, list[list[str]]] = {
    "_foreach": [["in_data_locs", "in_state_locs", "remain_locs"]],
    "_while_loop": [[], ["func_var_locs"]],
    "_cond": [[], [], []],
}


def bodies(node: Node) -> Iterator[Body]:
    """Yield the bodies of a control-flow node in MXNet's order, and nothing for any other node.
    Raises ``ValueError`` for an operator that was fused of others: its graph is none that can be rewritten."""
    if not node.subgraphs:
        return
    if node.op not in _ROLES:
        raise ValueError(
            f"{node.name!r} is fused of several operators ({node.op}), by MXNet or by mxmp.optimize_for_inference: "
            "such a graph serves as it is, and cannot be converted, trained or looked into; give the network as it was "
            "before"
        )
    for number, ((role, steers), raw) in enumerate(zip(_ROLES[node.op], node.subgraphs)):
        graph = Graph.from_json(json.dumps(raw))
        variables = _variables(graph)
        castable = {variables[place] for key in ("in_data_locs", "remain_locs") for place in _numbers(node, key)}
        yield Body(role, graph, steers, dict(zip(variables, _positions(node, number))), castable)


def refuse_fused(symbol: mx.sym.Symbol) -> None:
    """Raise ``ValueError``, as ``bodies``, for a Symbol in which operators were fused."""
    for node in Graph.from_symbol(symbol).nodes():
        list(bodies(node))


def control_flow(graph: Graph) -> list[Node]:
    """Return the nodes of ``graph`` that are ``foreach``, ``while_loop`` or ``cond``."""
    return [node for node in graph.nodes() if node.op in _ROLES]


def has_control_flow(graph: Graph) -> bool:
    """Return whether ``graph`` has control flow: then its CachedOp must not get the flag ``static_shape``."""
    # With the flag, MXNet 1.9.1 counts control flow as done before its bodies have run (CreateEngineOpSeg in
    # src/imperative/imperative_utils.h): what reads its outputs may run too early, in FP32 too. What oneDNN fused has a
    # subgraph as well, but needs the flag: without it, each call prepares the weights anew.
    return bool(control_flow(graph))


def wrongly_differentiated(graph: Graph, grad_req: Mapping[str, str]) -> list[str]:
    """Return the control flow in ``graph`` through which MXNet 1.9.1 gives wrong gradients, in FP32 too."""
    trained = {node for node in graph.nodes() if node.is_variable and grad_req.get(node.name, "null") != "null"}
    found = []
    for node in graph.nodes():
        positions = {at for at, entry in enumerate(node.inputs) if entry.node in trained}
        if positions and node.op != "BlockGrad":
            trained.add(node)
        # A _while_loop adds gradients to memory that it never clears. A _cond does not write the gradient of what only
        # the branch reads that did not run: it is what was in memory.
        if node.op == "_while_loop" and positions:
            found.append(node.name)
        elif node.op == "_cond":
            _, then, other = (set(body.positions.values()) for body in bodies(node))
            if positions & (then ^ other):
                found.append(node.name)
    return found


def rows(node: Node, body: Body) -> tuple[set[str], int]:
    """Return which tensors of a loop's ``body`` are rows of arrays: variables by name, and how many first outputs."""
    num_read = len(_numbers(node, "in_data_locs"))
    read = {variable.name for variable, position in body.positions.items() if position < num_read}
    return read, int(node.attrs["num_out_data"])


def set_bodies(node: Node, graphs: list[Graph]) -> None:
    """Replace the bodies of ``node``, in place, in the order of ``bodies(node)``."""
    for raw, graph in zip(node.subgraphs or (), graphs):
        before, after = ([v.name for v in _variables(g)] for g in (Graph.from_json(json.dumps(raw)), graph))
        # The node's attributes refer to the variables by position.
        if before != after:
            raise RuntimeError(f"{node.name}: the variables of a body were {before}, and are {after}")
    node.subgraphs = [json.loads(graph.to_json()) for graph in graphs]


def feed_bodies(node: Node, graphs: list[Graph], variable: str, value: Entry) -> None:
    """Replace the bodies of ``node``, in place, by some that read a new ``variable``, which stands for ``value``.
    ``value`` becomes the node's last input, which all iterations of a loop read."""
    end = len(node.inputs)
    node.inputs = (*node.inputs, value)
    node.attrs["num_args"] = str(int(node.attrs["num_args"]) + 1)
    for number, graph in enumerate(graphs):
        names = [each.name for each in _variables(graph)]
        if variable not in names:
            continue
        at = names.index(variable)
        moved = {key: [place + (place >= at) for place in _numbers(node, key)] for key in _PLACES[node.op][number]}
        if node.op == "_foreach":
            moved["remain_locs"].append(at)
        else:
            key = _INPUTS[node.op][number]
            moved[key] = _numbers(node, key)
            moved[key].insert(at, end)
        node.attrs.update({key: str(places) for key, places in moved.items()})
    node.subgraphs = [json.loads(graph.to_json()) for graph in graphs]


def _variables(graph: Graph) -> list[Node]:
    """Return the variables of a body in the order in which the node's attributes number them."""
    return [node for node in graph.nodes() if node.is_variable]


def _positions(node: Node, number: int) -> list[int]:
    """Return the position of the input of ``node`` that each variable of its body ``number`` stands for."""
    # The attributes of _foreach have the inverse: for each input of the node, the index of the variable.
    if node.op == "_foreach":
        places = [p for key in ("in_data_locs", "in_state_locs", "remain_locs") for p in _numbers(node, key)]
        return sorted(range(len(places)), key=places.__getitem__)
    return _numbers(node, _INPUTS[node.op][number])


def _numbers(node: Node, key: str) -> list[int]:
    """Return the attribute ``key``: ``[0, 2]`` for ``"(0, 2)"``, ``[]`` if it is absent."""
    return [int(n) for n in literal_eval(node.attrs.get(key, "[]"))]
