"""Says what the tensors are that MXNet's monitor reports of a converted graph, in the names of the FP32 graph."""

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
    """What one tensor is that MXNet's monitor reported: which operator made it, forward or backward, in which dtype.

    ``ObservedGraph.observe`` makes one for each name that the monitor reports. A sum of several gradients of one
    tensor, which MXNet adds up by itself, has ``SUM`` as its operator and label.

    Attributes
    ----------
    node : Node
        The node of the converted graph that made the tensor; mxmp may have inserted it.
    operator, op : str
        Name and type in the FP32 graph, such as ``"fc1"`` and ``"FullyConnected"``, of the operator that made the
        tensor. Where mxmp inserted ``node`` (a cast): of the operator whose output or gradient ``node`` casts; or, for
        the cast of a variable, the variable's name and ``"null"``.
    low : bool
        True if the tensor is rounded to the compute dtype, because an operator in low precision makes it or reads it.
    backward : bool
        True for the gradient with respect to an input of ``node``, False for an output of ``node``.
    inserted : bool
        True if mxmp inserted ``node``.
    of_output : bool
        True for the gradient of a graph output, made by the cast that mxmp put behind this output.
    label : str
        A text for reports: ``"fc"`` for an output of fc, ``"fc -> relu"`` for the gradient that fc sends back to relu.
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
    """A converted graph, and the names that its nodes and tensors have in the FP32 graph that it was made from.

    Below, an "operator of the FP32 graph" is a node of the converted graph that mxmp has not inserted. While a Probe
    listens, it makes one ObservedGraph for each training graph of the network.

    Attributes
    ----------
    plan : Plan
        The plan that the converted graph follows.
    low_variables : set of str
        Names of the variables that an operator in low precision reads, directly or through casts.
    """

    def __init__(
        self, symbol: mx.sym.Symbol, plan: Plan, has_gradient: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Read a converted graph.

        Parameters
        ----------
        symbol : Symbol
            The graph that runs, with casts.
        plan : Plan
            The plan that it follows.
        has_gradient : callable
            Takes the name of a variable and returns whether its gradient is computed. An executor also reports arrays
            for gradients that it never computes; ``observe`` returns None for these.
        """
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
        """Return what the tensor is that MXNet's monitor calls ``name``, for example ``"fc1_output"``.

        None where this graph has no such tensor, where it is an operator's input, or a gradient that is never computed.
        """
        if name not in self._observed:
            self._observed[name] = _A_SUM if SUMS.match(name) else self._find(name)
        return self._observed[name]

    def __contains__(self, node: Node) -> bool:
        """Return whether the node is one of this converted graph."""
        return node in self._differentiable

    def source(self, entry: Entry) -> Entry:
        """Return the output of an operator of the FP32 graph, or the variable, from which ``entry`` was computed.

        ``entry`` is an output in the converted graph. The nodes that mxmp inserted, such as casts, are followed back to
        their input. ``entry`` itself is returned where mxmp did not insert its node.
        """
        while entry.node not in self._names and entry.node.inputs:
            entry = source_of(entry) if is_ours(entry.node) else entry.node.inputs[0]
        return entry

    @property
    def operators(self) -> list[Node]:
        """Return the nodes of the converted graph that mxmp has not inserted, in graph order, without variables."""
        return list(self._names)

    def original_name(self, node: Node) -> str:
        """Return the name of a node of the converted graph in the FP32 graph; an inserted node's own name."""
        return self._names.get(node, node.name)

    def original_op(self, node: Node) -> str:
        """Return the operator type that a node of the converted graph has in the FP32 graph, such as ``"Convolution"``.

        It differs from ``node.op`` where a workaround computes the operator by another one.
        """
        decision = self.plan.decisions.get(self.original_name(node))
        return node.op if decision is None else decision.op

    def is_low(self, node: Node) -> bool:
        """Return whether the node is an operator of the FP32 graph that computes in low precision; casts are not."""
        return node in self._names and self.plan.decisions[self._names[node]].low

    def inputs(self, operator: str) -> list[Entry]:
        """Return the tensors that the operator of this name reads in the FP32 graph, in the order of its inputs."""
        return [self.source(e) for node, name in self._names.items() if name == operator for e in node.inputs]

    def readers(self, node: Node) -> list[Node]:
        """Return the operators of the FP32 graph that read outputs of ``node``, directly or through inserted nodes."""
        found: list[Node] = []
        stack = [node]
        while stack:
            users = self._users.get(stack.pop(), [])
            found += [user for user in users if user in self._names]
            stack += [user for user in users if user not in self._names]
        return list(dict.fromkeys(found))

    def readers_of(self, variable: str) -> list[Node]:
        """Return the operators that read the variable of this name, directly or through inserted nodes.

        The list is empty where the graph has no such variable.
        """
        node = self._nodes.get(variable)
        return [] if node is None else self.readers(node)

    def _find(self, name: str) -> Observed | None:
        """Return what the tensor is that MXNet's monitor calls ``name``; None in the same cases as ``observe``.

        The name is none of those that MXNet gives to sums of gradients.
        """
        place = place_of(self._nodes, name)
        if place is None or place.what == "input":
            return None
        node, inserted = place.node, place.node not in self._names
        if place.what == "output":
            made = self.source(Entry(node)).node if inserted else node
            low = any(map(self.is_low, [made, *self.readers(made)]))
            name = self.original_name(made)
            return Observed(node, name, self.original_op(made), low, False, inserted, False, label=name)
        index = place.number or 0
        if index >= len(node.inputs) or not self._differentiable[node.inputs[index].node]:
            return None
        senders = self.readers(node) if inserted else [node]
        receiver = self.source(node.inputs[index]).node
        made = (senders or [receiver])[0]
        low = any(map(self.is_low, [receiver, *senders]))
        of_output = node.attrs.get(MARK) == "head" and not senders
        label = f"{', '.join(map(self.original_name, senders)) or 'the loss'} -> {self.original_name(receiver)}"
        return Observed(node, self.original_name(made), self.original_op(made), low, True, inserted, of_output, label)


_A_SUM = Observed(Node("add_n", SUM), SUM, "add_n", False, True, True, False, SUM)
