"""What the names mean that MXNet's monitor gives to the tensors of a graph that runs in low precision."""

from __future__ import annotations

import re
from typing import Callable, NamedTuple

import mxnet as mx

from ...precision.casts import MARK, behind, is_ours
from ...precision.graph import Entry, Graph, Node
from ...precision.monitoring import SUMS, network_names
from ...precision.plan import Plan

__all__ = ["SUM", "Seen", "Wiring"]

# What MXNet adds gradients with where several operators read a tensor; nothing tells which one.
SUM = "a sum of gradients"


class Seen(NamedTuple):
    """One tensor that an operator made.

    Attributes
    ----------
    node : Node
        Of the graph that runs.
    operator, op : str
        Name and kind of the user's operator: the one that made it, or whose tensor a cast of ours hands on.
    low : bool
        Whether the tensor is rounded to the low dtype: a low operator makes it, or reads it.
    backward : bool
        Then the tensor is the gradient of input ``index``, otherwise it is output ``index``.
    ours : bool
        A cast of ours made it.
    enters : bool
        It is the gradient of an output of the graph, as the cast behind that output hands it on.
    label : str
        ``"fc"`` for an output, ``"fc -> relu"`` for the gradient that fc sends back to relu.
    """

    node: Node
    operator: str
    op: str
    low: bool
    backward: bool
    index: int  # type: ignore[assignment]
    ours: bool
    enters: bool
    label: str


class Wiring:
    """The low graph of one block or module, with the names of the FP32 graph.

    Parameters
    ----------
    symbol : Symbol
        What runs.
    plan : Plan
    trained : callable
        Whether the variable of a name has a gradient: others' are never written where an executor runs.
    """

    def __init__(self, symbol: mx.sym.Symbol, plan: Plan, trained: Callable[[str], bool] = lambda name: True) -> None:
        self.graph = Graph.from_symbol(symbol)
        self.plan = plan
        self._nodes: dict[str, Node] = {}
        self._names = network_names(self.graph, plan)
        self._needs: dict[Node, bool] = {}
        for node in self.graph.nodes():
            self._nodes.setdefault(node.name, node)
            wanted = trained(node.name) if node.is_variable else any(self._needs[e.node] for e in node.inputs)
            self._needs[node] = wanted
        self._users: dict[Node, list[Node]] = {}
        for entry, users in self.graph.consumers().items():
            self._users.setdefault(entry.node, []).extend(user for user, _ in users)
        self._read: dict[str, Seen | None] = {}
        self.low_variables = {
            source.node.name
            for node in self._names
            if self.is_low(node)
            for source in map(self.source, node.inputs)
            if source.node.is_variable
        }

    def read(self, name: str) -> Seen | None:
        """What the monitor's ``name`` stands for; None for what is no tensor of this graph, or never written."""
        if name not in self._read:
            self._read[name] = _A_SUM if SUMS.match(name) else self._find(name)
        return self._read[name]

    def __contains__(self, node: Node) -> bool:
        return node in self._needs

    def source(self, entry: Entry) -> Entry:
        """The user's operator or variable whose tensor ``entry`` is, behind whatever mxmp put between."""
        while entry.node not in self._names and entry.node.inputs:
            entry = behind(entry) if is_ours(entry.node) else entry.node.inputs[0]
        return entry

    @property
    def operators(self) -> list[Node]:
        """The user's, in the order of the graph that runs."""
        return list(self._names)

    def name(self, node: Node) -> str:
        """As in the FP32 graph."""
        return self._names.get(node, node.name)

    def kind(self, node: Node) -> str:
        """The user's operator, which another may stand for in the graph that runs."""
        decision = self.plan.decisions.get(self.name(node))
        return node.op if decision is None else decision.op

    def is_low(self, node: Node) -> bool:
        """Whether a user's operator computes in the low dtype."""
        return node in self._names and self.plan.decisions[self._names[node]].low

    def inputs(self, operator: str) -> list[Entry]:
        """What the user's operator reads, in its order."""
        return [self.source(e) for node, name in self._names.items() if name == operator for e in node.inputs]

    def readers(self, node: Node) -> list[Node]:
        """The user's operators that read what ``node`` makes, directly or through what mxmp put between."""
        found: list[Node] = []
        stack = [node]
        while stack:
            users = self._users.get(stack.pop(), [])
            found += [user for user in users if user in self._names]
            stack += [user for user in users if user not in self._names]
        return list(dict.fromkeys(found))

    def readers_of(self, variable: str) -> list[Node]:
        """The user's operators that read the variable of this name."""
        node = self._nodes.get(variable)
        return [] if node is None else self.readers(node)

    def _find(self, name: str) -> Seen | None:
        backward = re.fullmatch(r"(.+)_backward_(?:output)?(\d*)", name)
        if backward and backward[1] in self._nodes:
            return self._gradient(self._nodes[backward[1]], int(backward[2] or 0))
        parts = name.split("_")
        for end in range(len(parts) - 1, 0, -1):
            node = self._nodes.get("_".join(parts[:end]))
            if node is not None:
                index = re.fullmatch(r"(?:output)?(\d*)", "_".join(parts[end:]))
                return self._output(node, int(index[1] or 0)) if index else None
        return None

    def _output(self, node: Node, index: int) -> Seen:
        made = node if node in self._names else self.source(Entry(node)).node
        low = any(map(self.is_low, [made, *self.readers(made)]))
        return self._seen(node, made, low, index, self.name(made))

    def _gradient(self, node: Node, index: int) -> Seen | None:
        if index >= len(node.inputs) or not self._needs[node.inputs[index].node]:
            return None
        senders = [node] if node in self._names else self.readers(node)
        to = self.source(node.inputs[index]).node
        label = f"{', '.join(map(self.name, senders)) or 'the loss'} -> {self.name(to)}"
        low = any(map(self.is_low, [to, *senders]))
        enters = node.attrs.get(MARK) == "head" and not senders
        seen = self._seen(node, senders[0] if senders else to, low, index, label)
        return seen._replace(backward=True, enters=enters)

    def _seen(self, node: Node, operator: Node, low: bool, index: int, label: str) -> Seen:
        name = self.name(operator)
        return Seen(node, name, self.kind(operator), low, False, index, node not in self._names, False, label)


_A_SUM = Seen(Node("add_n", SUM), SUM, "add_n", False, True, 0, True, False, SUM)
