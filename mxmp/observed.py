"""Reads the reports of MXNet's monitor on a graph in low precision, operator by operator, by the FP32 graph's names."""

from __future__ import annotations

from typing import Callable, NamedTuple

import mxnet as mx

from .precision.casts import MARK, is_ours, source_of
from .precision.graph import Entry, Graph, Node
from .precision.monitoring import SUMS, network_names, place_of
from .precision.plan import Plan

__all__ = ["SUM", "Observed", "ObservedGraph"]

# MXNet's sum of gradients where several operators read a tensor; it does not say which tensor.
SUM = "a sum of gradients"


class Observed(NamedTuple):
    """One tensor that a node of the graph made.

    Attributes
    ----------
    node : Node
        The node, of the graph that runs.
    operator, op : str
        Name and kind of the user's operator: the one that made the tensor, or the one whose tensor an inserted cast
        reads.
    low : bool
        Whether the tensor is rounded to the low dtype: an operator in low precision makes it, or reads it.
    backward : bool
        Whether it is the gradient of an input of the node, not an output.
    inserted : bool
        Whether mxmp inserted the node.
    of_output : bool
        Whether it is the gradient of a graph output, as the cast of that output makes it.
    label : str
        ``"fc"`` for an output, ``"fc -> relu"`` for the gradient that fc sends back to relu.
    """

    node: Node
    operator: str
    op: str
    low: bool
    backward: bool
    inserted: bool
    of_output: bool
    label: str


class ObservedGraph:
    """The graph that one block or module runs, with the names of the FP32 graph.

    Parameters
    ----------
    symbol : Symbol
        The graph that runs, with casts.
    plan : Plan
    has_gradient : callable
        From a variable's name to whether it has a gradient. Other gradients are never written where an executor runs.
    """

    def __init__(
        self, symbol: mx.sym.Symbol, plan: Plan, has_gradient: Callable[[str], bool] = lambda name: True
    ) -> None:
        graph = Graph.from_symbol(symbol)
        self.plan = plan
        self._names = network_names(graph, plan)
        self._nodes: dict[str, Node] = {}
        self._differentiable: dict[Node, bool] = {}
        for node in graph.nodes():
            self._nodes.setdefault(node.name, node)
            below = any(self._differentiable[entry.node] for entry in node.inputs)
            self._differentiable[node] = has_gradient(node.name) if node.is_variable else below
        self._users: dict[Node, list[Node]] = {}
        for entry, users in graph.consumers().items():
            self._users.setdefault(entry.node, []).extend(user for user, _ in users)
        self._observed: dict[str, Observed | None] = {}
        sources = [self.source(entry).node for node in self._names if self.is_low(node) for entry in node.inputs]
        self.low_variables = {node.name for node in sources if node.is_variable}

    def observe(self, name: str) -> Observed | None:
        """Return what the monitor's ``name`` stands for; None where it is not this graph's, or never written."""
        if name not in self._observed:
            self._observed[name] = _A_SUM if SUMS.match(name) else self._find(name)
        return self._observed[name]

    def __contains__(self, node: Node) -> bool:
        return node in self._differentiable

    def source(self, entry: Entry) -> Entry:
        """Return the output of a user's operator, or the variable, that inserted nodes made ``entry`` of."""
        while entry.node not in self._names and entry.node.inputs:
            entry = source_of(entry) if is_ours(entry.node) else entry.node.inputs[0]
        return entry

    @property
    def operators(self) -> list[Node]:
        """Return the user's operators, in the order of the graph that runs."""
        return list(self._names)

    def name(self, node: Node) -> str:
        """Return the node's name in the FP32 graph."""
        return self._names.get(node, node.name)

    def kind(self, node: Node) -> str:
        """Return the user's operator, which runs as another one where a workaround replaces it."""
        decision = self.plan.decisions.get(self.name(node))
        return node.op if decision is None else decision.op

    def is_low(self, node: Node) -> bool:
        """Return whether it is a user's operator that computes in the low dtype."""
        return node in self._names and self.plan.decisions[self._names[node]].low

    def inputs(self, operator: str) -> list[Entry]:
        """Return what the user's operator of this name reads, in its order."""
        return [self.source(e) for node, name in self._names.items() if name == operator for e in node.inputs]

    def readers(self, node: Node) -> list[Node]:
        """Return the user's operators that read what ``node`` makes, directly or through inserted nodes."""
        found: list[Node] = []
        stack = [node]
        while stack:
            users = self._users.get(stack.pop(), [])
            found += [user for user in users if user in self._names]
            stack += [user for user in users if user not in self._names]
        return list(dict.fromkeys(found))

    def readers_of(self, variable: str) -> list[Node]:
        """Return the user's operators that read the variable of this name."""
        node = self._nodes.get(variable)
        return [] if node is None else self.readers(node)

    def _find(self, name: str) -> Observed | None:
        place = place_of(self._nodes, name)
        if place is None or place.what == "input":
            return None
        node, inserted = place.node, place.node not in self._names
        if place.what == "output":
            made = self.source(Entry(node)).node if inserted else node
            low = any(map(self.is_low, [made, *self.readers(made)]))
            return Observed(node, self.name(made), self.kind(made), low, False, inserted, False, self.name(made))
        index = place.number or 0
        if index >= len(node.inputs) or not self._differentiable[node.inputs[index].node]:
            return None
        senders = self.readers(node) if inserted else [node]
        receiver = self.source(node.inputs[index]).node
        operator = (senders or [receiver])[0]
        low = any(map(self.is_low, [receiver, *senders]))
        of_output = node.attrs.get(MARK) == "head" and not senders
        label = f"{', '.join(map(self.name, senders)) or 'the loss'} -> {self.name(receiver)}"
        return Observed(node, self.name(operator), self.kind(operator), low, True, inserted, of_output, label)


_A_SUM = Observed(Node("add_n", SUM), SUM, "add_n", False, True, True, False, SUM)
