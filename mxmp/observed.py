"""Says what the tensors are that MXNet's monitor reports of a converted graph, in the names of the FP32 graph."""

from __future__ import annotations

from typing import Callable, NamedTuple

import mxnet as mx

from .precision.casts import MARK, inserted, is_ours, source_of
from .precision.graph import Entry, Graph, Node
from .precision.monitoring import SUMS, network_names, place_of
from .precision.plan import Plan

# MXNet's sum of gradients where several operators read a tensor; it does not say which tensor.
SUM = "a sum of gradients"


class Observed(NamedTuple):
    """One tensor that MXNet's monitor reported: its operator, whether it is a gradient, its precision."""

    # The node of the converted graph that made the tensor, possibly a cast that mxmp inserted.
    node: Node
    # Name and type of the operator in the FP32 graph. For an inserted node: in the forward of the operator whose output
    # it casts (type ``"null"`` for a variable); in the backward of one that reads its output and so sends the gradient,
    # or, if only the loss does, of the one that makes the graph output.
    operator: str
    op: str
    # Whether an operator in low precision makes or reads the tensor, or the tensor whose gradient it is, directly or
    # through inserted nodes.
    low: bool
    # True for the gradient with respect to an input of ``node``, False for an output of ``node``.
    backward: bool
    inserted: bool
    # Whether it is the gradient of a graph output, which MXNet reports only if mxmp inserted a cast there: the sum of
    # the loss's gradient and those of operators that read the cast.
    of_output: bool
    # Whether the same gradient of a graph output is reported in FP32 too, before a cast has rounded it.
    rounded: bool
    # For reports: ``"fc"`` for an output, ``"fc -> relu"`` for the gradient that fc sends to relu; for that of a graph
    # output ``"the loss, out -> fc"`` if an operator ``out`` reads its cast too.
    label: str


def with_gradients_of_outputs(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a converted graph that copies each output which it has cast, so that MXNet's monitor reports the gradient
    of the output before the cast rounds it."""
    graph = Graph.from_symbol(symbol)
    graph.heads = [
        inserted("_copy", f"{e.node.name}{_UNROUNDED}", [e]) if e.node.attrs.get(MARK) == "head" else e
        for e in graph.heads
    ]
    return graph.to_symbol()


_UNROUNDED = "_before_rounding"


class ObservedGraph:
    """Finds what nodes and tensors of a converted graph stand for in the FP32 graph that it was made from.
    All nodes are the converted graph's: an operator of the FP32 graph is one that mxmp has not inserted, and a tensor
    of it is an output of such an operator, or a variable."""

    def __init__(self, symbol: mx.sym.Symbol, plan: Plan, has_gradient: Callable[[str], bool]) -> None:
        graph = Graph.from_symbol(symbol)
        self.plan = plan
        self._names = network_names(graph, plan)
        self._nodes: dict[str, Node] = {}
        self._differentiable: dict[Node, bool] = {}
        for node in graph.nodes():
            self._nodes.setdefault(node.name, node)
            below = any(self._differentiable[entry.node] for entry in node.inputs)
            self._differentiable[node] = has_gradient(node.name) if node.is_variable else below
        self._users = graph.readers()
        self._observed: dict[str, Observed | None] = {}
        self._outputs = {self.source(head).node for head in graph.heads}
        sources = [self.source(entry).node for node in self._names if self.is_low(node) for entry in node.inputs]
        # Those that an operator in low precision reads, directly or through casts.
        self.low_variables = {node.name for node in sources if node.is_variable}

    def observe(self, name: str) -> Observed | None:
        """Describe the tensor that the monitor calls ``name`` (``"fc1_output"``).
        None for another graph's, an operator's input, or a gradient that backward never computes."""
        if name not in self._observed:
            self._observed[name] = _A_SUM if SUMS.match(name) else self._find(name)
        return self._observed[name]

    def __contains__(self, node: Node) -> bool:
        return node in self._differentiable

    def source(self, entry: Entry) -> Entry:
        """Return the FP32 graph's tensor from which inserted nodes, such as casts, made ``entry``, if any did."""
        while entry.node not in self._names and entry.node.inputs:
            entry = source_of(entry) if is_ours(entry.node) else entry.node.inputs[0]
        return entry

    @property
    def operators(self) -> list[Node]:
        """Return the nodes that mxmp has not inserted, in graph order, without variables."""
        return list(self._names)

    def original_name(self, node: Node) -> str:
        """Return the FP32 graph's name; it differs where a cast of a graph output took the operator's name."""
        return self._names.get(node, node.name)

    def original_op(self, node: Node) -> str:
        """Return the FP32 graph's type of an operator; it differs where a workaround has replaced the operator."""
        decision = self.plan.decisions.get(self.original_name(node))
        return node.op if decision is None else decision.op

    def is_low(self, node: Node) -> bool:
        """Return whether ``node`` computes in low precision; False for variables and nodes that mxmp inserted."""
        return node in self._names and self.plan.decisions[self._names[node]].low

    def is_output(self, node: Node) -> bool:
        """Return whether ``node``, or for an inserted node its source, makes an output of the FP32 graph."""
        return self.source(Entry(node)).node in self._outputs

    def inputs(self, operator: str) -> list[Entry]:
        """Return the tensors of the FP32 graph that the operators named ``operator`` there read, input by input."""
        return [self.source(e) for node, name in self._names.items() if name == operator for e in node.inputs]

    def readers(self, node: Node) -> list[Node]:
        """Return the operators of the FP32 graph that read ``node``, directly or through inserted nodes, each once."""
        found: list[Node] = []
        stack = [node]
        while stack:
            users = [user for user, _ in self._users.get(stack.pop(), ())]
            found += [user for user in users if user in self._names]
            stack += [user for user in users if user not in self._names]
        return list(dict.fromkeys(found))

    def readers_of(self, variable: str) -> list[Node]:
        """Return the ``readers`` of a variable; none if the graph has no such variable."""
        node = self._nodes.get(variable)
        return [] if node is None else self.readers(node)

    def _find(self, name: str) -> Observed | None:
        """Return what ``observe`` does, for a name that is not that of a sum of gradients (``SUMS``)."""
        place = place_of(self._nodes, name)
        if place is None or place.what == "input":
            return None
        node, inserted = place.node, place.node not in self._names
        if place.what == "output":
            made = self.source(Entry(node)).node if inserted else node
            low = any(map(self.is_low, [made, *self.readers(made)]))
            name = self.original_name(made)
            return Observed(node, name, self.original_op(made), low, False, inserted, False, False, label=name)
        index = place.number or 0
        if index >= len(node.inputs) or not self._differentiable[node.inputs[index].node]:
            return None
        senders = self.readers(node) if inserted else [node]
        receiver = self.source(node.inputs[index]).node
        made = (senders or [receiver])[0]
        low = any(map(self.is_low, [receiver, *senders]))
        copies = [user for user, _ in self._users.get(node, ()) if user.name == f"{node.name}{_UNROUNDED}"]
        of_output = node.attrs.get(MARK) == "head" or node.name.endswith(_UNROUNDED)
        rounded = bool(copies) and not senders
        names = [*(["the loss"] if of_output else []), *map(self.original_name, senders)]
        label = f"{', '.join(names) or 'the loss'} -> {self.original_name(receiver)}"
        made_by = self.original_name(made), self.original_op(made)
        return Observed(node, *made_by, low, True, inserted, of_output, rounded, label)


_A_SUM = Observed(Node("add_n", SUM), SUM, "add_n", False, True, True, False, False, SUM)
