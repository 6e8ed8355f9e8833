"""A planned graph with its casts, and back: what was inserted can be taken out again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Mapping

from .graph import Entry, Graph, Node
from .plan import PlannedGraph
from .rules import Rule
from .subgraphs import bodies, set_bodies

__all__ = [
    "APART",
    "FULL",
    "MARK",
    "PASSED",
    "CastGraph",
    "declare_full",
    "insert_casts",
    "is_ours",
    "passed_on",
    "replace_heads",
    "replace_operator",
    "source_of",
    "strip",
]

# Marks every node that mxmp inserts; MXNet carries attributes of this form through any operator.
MARK = "__mxmp__"
# On such a node: which input it hands on, where that is not the first; "each" hands on every one.
PASSED = "__mxmp_passed__"
# MXNet merges equal nodes (MXNET_ELIMINATE_COMMON_EXPR), and tells them apart by their attributes.
APART = "__mxmp_apart__"
_STORED = "__mxmp_stored__"
_REPLACED = "__mxmp_replaced__"
FULL = "float32"
# Variables carry mshadow's type codes, operators dtype names.
_TYPE_CODE = {"float32": "0", "float16": "2"}


@dataclass
class CastGraph:
    """A graph with casts.

    Attributes
    ----------
    graph : Graph
    compute : str
        Dtype that the low operators read and write.
    casts : list of Node
    low : dict of Node to Rule
        The operators that compute low.
    source : dict of Node to Node
        From a node of this graph to the node of the planned one; casts have none.
    norm : {None, "float32", "compute"}
        Of the policy.
    workarounds : dict of str to list of Node
        The workarounds that were applied to this graph, by name, and the nodes that needed them.
    """

    graph: Graph
    compute: str
    casts: list[Node]
    low: dict[Node, Rule]
    source: dict[Node, Node]
    norm: str | None = None
    workarounds: dict[str, list[Node]] = field(default_factory=dict)


def insert_casts(planned: PlannedGraph) -> CastGraph:
    """A new graph with one shared cast per tensor and dtype; ``planned.graph`` is untouched.

    Arguments, auxiliary states and the names of single-output heads stay: a cast at a head takes the
    head's name and the node behind it is renamed.
    """
    return _Rewriter(planned).run()


def is_ours(node: Node) -> bool:
    """Return whether mxmp inserted this node."""
    return MARK in node.attrs


def source_of(entry: Entry) -> Entry:
    """Return the tensor that a node of ours passes on, through other nodes of ours."""
    while is_ours(entry.node) and entry.node.inputs:
        entry = passed_on(entry)
    return entry


def strip(graph: Graph) -> Graph:
    """Return the graph without the nodes that mxmp inserted: the original graph, with its names."""
    new: dict[Node, Node] = {}
    renamed: dict[Node, str] = {}

    def resolve(entry: Entry) -> Entry:
        name = None
        while is_ours(entry.node):
            if entry.node.attrs[MARK] == "head":
                name = name or entry.node.name
            entry = passed_on(entry)
        if name:
            renamed[entry.node] = name
        return Entry(new[entry.node], entry.index, entry.version)

    for node in graph.nodes():
        if not is_ours(node):
            new[node] = _copy(node, [resolve(e) for e in node.inputs], new)
            _restore_dtype(new[node])
            _restore_operator(new[node])
            if node.subgraphs:
                set_bodies(new[node], [strip(body.graph) for body in bodies(node)])
    heads = [resolve(e) for e in graph.heads]
    for node, name in renamed.items():
        new[node].name = name
    return Graph(heads, graph.attrs, numpy=graph.numpy)


def replace_operator(node: Node, op: str, **attrs: str) -> None:
    """Compute a node of the user's by another operator, with these parameters, in place; ``strip`` undoes it."""
    hidden = {name: value for name, value in node.attrs.items() if _is_hidden(name)}
    node.attrs = {**hidden, **attrs, _REPLACED: json.dumps([node.op, node.attrs])}
    node.op = op


def replace_heads(graph: Graph, made: Mapping[Node, Entry]) -> None:
    """Have heads be what we made behind their first outputs, under their names, in place; ``strip`` undoes it."""
    for position, head in enumerate(graph.heads):
        if head.index == 0 and head.node in made:
            _take_name(made[head.node].node, head.node, "inner")
            graph.heads[position] = made[head.node]


def _take_name(ours: Node, source: Node, suffix: str) -> None:
    """Have a node of ours stand at a head under the name of the node behind it."""
    if ours.attrs[MARK] != "head":
        ours.attrs[MARK] = "head"
        ours.name, source.name = source.name, f"{source.name}_{suffix}"


def declare_full(graph: Graph) -> None:
    """Say that variables which only our casts read are FP32, in place.

    MXNet infers the dtype of a weight from its operator; through a cast it infers nothing, and binding
    fails where the dtypes of some inputs are given, as Module gives them.
    """
    for entry, users in graph.consumers().items():
        variable = entry.node
        undeclared = variable.is_variable and "__dtype__" not in variable.attrs
        if undeclared and all(is_ours(node) for node, _ in users):
            _store(variable, FULL)


class _Rewriter:
    def __init__(self, planned: PlannedGraph) -> None:
        self._planned = planned
        self._policy = planned.plan.policy
        self._new: dict[Node, Node] = {}
        self._casts: dict[tuple[Entry, str], Node] = {}

    def run(self) -> CastGraph:
        planned, new = self._planned, self._new
        for node in planned.graph.nodes():
            inputs = [self._read(e, node, i) for i, e in enumerate(node.inputs)]
            new[node] = _copy(node, inputs, new)
            if node in planned.low_variables:
                _store(new[node], self._policy.compute)
        heads = [self._head(entry) for entry in planned.graph.heads]
        return CastGraph(
            Graph(heads, planned.graph.attrs, numpy=planned.graph.numpy),
            self._policy.compute,
            list(self._casts.values()),
            {new[node]: planned.rules[node] for node, decision in planned.decisions.items() if decision.low},
            {copy: node for node, copy in new.items()},
            self._policy.norm,
        )

    def _read(self, entry: Entry, node: Node, position: int) -> Entry:
        if node.is_variable:
            return self._moved(entry)
        low = self._planned.wants_low(node, position)
        if low == self._planned.is_low(entry):
            return self._moved(entry)
        return self._cast(entry, self._policy.compute if low else FULL)

    def _head(self, entry: Entry) -> Entry:
        if self._policy.output != FULL or not self._planned.is_low(entry):
            return self._moved(entry)
        cast = self._cast(entry, FULL)
        if entry.index == 0:
            _take_name(cast.node, self._new[entry.node], self._policy.compute)
        return cast

    def _cast(self, entry: Entry, dtype: str) -> Entry:
        key = (entry, dtype)
        if key not in self._casts:
            suffix = f"_{entry.index}" if entry.index else ""
            self._casts[key] = Node(
                "Cast",
                f"{entry.node.name}{suffix}_to_{dtype}",
                {"dtype": dtype, MARK: "cast"},
                [self._moved(entry)],
            )
        return Entry(self._casts[key])

    def _moved(self, entry: Entry) -> Entry:
        return Entry(self._new[entry.node], entry.index, entry.version)


def _copy(node: Node, inputs: list[Entry], new: dict[Node, Node]) -> Node:
    return Node(
        node.op,
        node.name,
        dict(node.attrs),
        inputs,
        [new[n] for n in node.control_deps],
        node.subgraphs,
    )


def passed_on(entry: Entry) -> Entry:
    """Return the tensor that one of our nodes passes on."""
    position = entry.node.attrs.get(PASSED, "0")
    return entry.node.inputs[entry.index if position == "each" else int(position)]


def _store(variable: Node, dtype: str) -> None:
    """Declare the dtype that a variable is stored in; type inference needs it told (a Cast tells nothing)."""
    variable.attrs[_STORED] = variable.attrs.get("__dtype__", "")
    variable.attrs["__dtype__"] = _TYPE_CODE[dtype]


def _restore_dtype(node: Node) -> None:
    if _STORED in node.attrs:
        before = node.attrs.pop(_STORED)
        del node.attrs["__dtype__"]
        if before:
            node.attrs["__dtype__"] = before


def _restore_operator(node: Node) -> None:
    if _REPLACED in node.attrs:
        node.op, before = json.loads(node.attrs.pop(_REPLACED))
        node.attrs = {**before, **{name: value for name, value in node.attrs.items() if _is_hidden(name)}}


def _is_hidden(attr: str) -> bool:
    return attr.startswith("__")
