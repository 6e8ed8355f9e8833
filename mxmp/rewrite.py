"""From a plan to a graph with casts, and back: what was inserted can be taken out again."""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Entry, Graph, Node
from .plan import Decision, Plan

__all__ = ["MARK", "Rewritten", "declare_full", "insert_casts", "is_ours", "strip"]

# Marks every node that mxmp inserts; MXNet carries attributes of this form through any operator.
MARK = "__mxmp__"
_STORED = "__mxmp_stored__"
FULL = "float32"
# Variables carry mshadow's type codes, operators dtype names.
_TYPE_CODE = {"float32": "0", "float16": "2"}


@dataclass
class Rewritten:
    """The graph with casts, the nodes in it that compute low, and where each came from.

    ``source`` maps a node of the new graph to the node of the old one; inserted casts have none.
    """

    graph: Graph
    plan: Plan
    casts: list[Node]
    source: dict[Node, Node]

    def decision(self, node: Node) -> Decision | None:
        """The decision that holds for a node of the new graph; None for variables and casts."""
        source = self.source.get(node)
        return None if source is None else self.plan.decisions.get(source)


def insert_casts(plan: Plan) -> Rewritten:
    """A new graph with one shared cast per tensor and dtype; ``plan.graph`` is untouched.

    Arguments, auxiliary states and the names of single-output heads stay: a cast at a head takes the
    head's name and the node behind it is renamed.
    """
    return _Rewriter(plan).run()


def is_ours(node: Node) -> bool:
    """Whether mxmp inserted this node."""
    return MARK in node.attrs


def strip(graph: Graph) -> Graph:
    """The graph without anything that mxmp inserted: the original, names included."""
    new: dict[Node, Node] = {}
    renamed: dict[Node, str] = {}

    def resolve(entry: Entry) -> Entry:
        name = None
        while is_ours(entry.node):
            if entry.node.attrs[MARK] == "head":
                name = name or entry.node.name
            entry = entry.node.inputs[0]
        if name:
            renamed[entry.node] = name
        return entry._replace(node=new[entry.node])

    for node in graph.nodes():
        if not is_ours(node):
            new[node] = _copy(node, [resolve(e) for e in node.inputs], new)
            _restore_dtype(new[node])
    heads = [resolve(e) for e in graph.heads]
    for node, name in renamed.items():
        new[node].name = name
    return Graph(heads, graph.attrs, numpy=graph.numpy)


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
    def __init__(self, plan: Plan) -> None:
        self._graph = plan.graph
        self._plan = plan
        self._new: dict[Node, Node] = {}
        self._casts: dict[tuple[Entry, str], Node] = {}

    def run(self) -> Rewritten:
        plan = self._plan
        for node in self._graph.nodes():
            inputs = [self._read(e, node, i) for i, e in enumerate(node.inputs)]
            self._new[node] = _copy(node, inputs, self._new)
            if node in plan.low_variables:
                _store(self._new[node], plan.policy.compute)
        heads = [self._head(entry) for entry in self._graph.heads]
        return Rewritten(
            Graph(heads, self._graph.attrs, numpy=self._graph.numpy),
            plan,
            list(self._casts.values()),
            {new: old for old, new in self._new.items()},
        )

    def _read(self, entry: Entry, node: Node, position: int) -> Entry:
        plan = self._plan
        if node.is_variable:
            return self._moved(entry)
        low = plan.wants_low(node, position)
        if low == plan.is_low(entry):
            return self._moved(entry)
        return self._cast(entry, plan.policy.compute if low else FULL)

    def _head(self, entry: Entry) -> Entry:
        plan = self._plan
        if plan.policy.output != "float32" or not plan.is_low(entry):
            return self._moved(entry)
        cast = self._cast(entry, FULL)
        source = self._new[entry.node]
        if entry.index == 0 and cast.node.attrs[MARK] != "head":
            cast.node.attrs[MARK] = "head"
            cast.node.name, source.name = source.name, f"{source.name}_{plan.policy.compute}"
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
        return entry._replace(node=self._new[entry.node])


def _copy(node: Node, inputs: list[Entry], new: dict[Node, Node]) -> Node:
    return Node(
        node.op,
        node.name,
        dict(node.attrs),
        inputs,
        [new[n] for n in node.control_deps],
        node.subgraphs,
    )


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
