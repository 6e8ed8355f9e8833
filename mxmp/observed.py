"""Says what the tensors are that MXNet's monitor reports of a converted graph, in the names of the FP32 graph."""

from __future__ import annotations

from typing import Callable, NamedTuple

import mxnet as mx

from .precision.casts import MARK, is_ours, source_of
from .precision.graph import Entry, Graph, Node
from .precision.monitoring import SUMS, network_names, place_of
from .precision.plan import Plan

# MXNet's sum of gradients where several operators read a tensor; it does not say which tensor.
SUM = "a sum of gradients"


class Observed(NamedTuple):
    """A description of one tensor that MXNet's monitor reported: its operator, whether it is a gradient, its precision.

    ``ObservedGraph.observe`` makes it from the name that the monitor reports. Where several operators read a tensor,
    MXNet adds their gradients by itself and does not say of which tensor. For such a sum ``operator`` and ``label`` are
    ``SUM`` (``"a sum of gradients"``), ``op`` is ``"add_n"``, ``node`` is in no graph, ``low`` and ``of_output`` are
    False, ``backward`` and ``inserted`` True.

    Attributes
    ----------
    node : Node
        The node of the converted graph that made the tensor, forward or backward; possibly a cast that mxmp inserted.
    operator, op : str
        Name and type in the FP32 graph, such as ``"fc1"`` and ``"FullyConnected"``, of the operator that made the
        tensor. In the forward, where mxmp inserted ``node``, such as a cast, they are those of the operator whose
        output it casts (``"null"`` is the type of a variable). In the backward, where mxmp inserted ``node``, they are
        those of an operator that reads its output and so sends the gradient (any one, if there are several), or, if
        only the loss sends it, of the operator that makes the graph output.
    low : bool
        True if an operator in low precision makes the tensor, or reads it, directly or through casts. The output of a
        node that mxmp inserted counts as the tensor that the node passes on. For a gradient, True if such an operator
        sends it, or makes the tensor whose gradient it is.
    backward : bool
        True for the gradient with respect to an input of ``node``, False for an output of ``node``.
    inserted : bool
        True if mxmp inserted ``node``.
    of_output : bool
        True for the gradient of a graph output. MXNet reports it only if mxmp inserted a cast after the operator: the
        cast's backward casts the sum of the loss's gradient and those of operators that read the cast.
    label : str
        A text for reports: ``"fc"`` for an output of fc, ``"fc -> relu"`` for the gradient that fc sends back to relu,
        ``"the loss -> fc"`` for the gradient of a graph output, ``"the loss, out -> fc"`` if an operator ``out`` reads
        the output's cast too.
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
    """Finds for nodes and tensors of a converted graph what they stand for in the FP32 graph that it was made from.

    A Probe, which reports the tensors of training steps, makes one for each training graph of the network. All nodes
    here are those of the converted graph: an "operator of the FP32 graph" is an operator in it that mxmp has not
    inserted, and a "tensor of the FP32 graph" is an output of such an operator, or a variable.

    Parameters
    ----------
    symbol : Symbol
        The converted graph.
    plan : Plan
        The plan that the converted graph follows.
    has_gradient : callable
        Returns, for the name of a variable of the converted graph, whether the backward writes the variable's gradient.

    Attributes
    ----------
    plan
        As given.
    low_variables : set of str
        Names of the variables that an operator in low precision reads, directly or through casts.
    """

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
        self._users: dict[Node, list[Node]] = {}
        for entry, users in graph.consumers().items():
            self._users.setdefault(entry.node, []).extend(user for user, _ in users)
        self._observed: dict[str, Observed | None] = {}
        self._outputs = {self.source(head).node for head in graph.heads}
        sources = [self.source(entry).node for node in self._names if self.is_low(node) for entry in node.inputs]
        self.low_variables = {node.name for node in sources if node.is_variable}

    def observe(self, name: str) -> Observed | None:
        """Return a description of the tensor that MXNet's monitor calls ``name``, for example ``"fc1_output"``.

        Returns None if this graph has no tensor of this name, if the name is that of an operator's input, or if the
        tensor is a gradient that backward never computes.
        """
        if name not in self._observed:
            self._observed[name] = _A_SUM if SUMS.match(name) else self._find(name)
        return self._observed[name]

    def __contains__(self, node: Node) -> bool:
        """Return whether this object ``node`` is a node of the converted graph; names are not compared."""
        return node in self._differentiable

    def source(self, entry: Entry) -> Entry:
        """Return the tensor of the FP32 graph from which nodes that mxmp inserted, such as casts, made ``entry``.

        Returns ``entry`` itself if it is a tensor of the FP32 graph, or if an inserted node without inputs made it.
        """
        while entry.node not in self._names and entry.node.inputs:
            entry = source_of(entry) if is_ours(entry.node) else entry.node.inputs[0]
        return entry

    @property
    def operators(self) -> list[Node]:
        """Return the nodes of the converted graph that mxmp has not inserted, in graph order, without variables."""
        return list(self._names)

    def original_name(self, node: Node) -> str:
        """Return the name that a node of the converted graph has in the FP32 graph.

        The two differ where a cast of a graph output took the operator's name, so that the outputs keep their names.
        Returns ``node.name`` for a variable and for a node that mxmp inserted.
        """
        return self._names.get(node, node.name)

    def original_op(self, node: Node) -> str:
        """Return the type in the FP32 graph, such as ``"Convolution"``, of an operator that mxmp has not inserted.

        It differs from ``node.op`` where a workaround has replaced the operator by one of another type.
        """
        decision = self.plan.decisions.get(self.original_name(node))
        return node.op if decision is None else decision.op

    def is_low(self, node: Node) -> bool:
        """Return whether ``node`` computes in low precision; False for variables and nodes that mxmp inserted."""
        return node in self._names and self.plan.decisions[self._names[node]].low

    def is_output(self, node: Node) -> bool:
        """Return whether ``node``, a node of the converted graph, makes an output of the FP32 graph.

        Any node that mxmp inserted, such as a cast, counts as the operator or variable that ``source`` leads to, even
        if another node makes the output of the converted graph.
        """
        return self.source(Entry(node)).node in self._outputs

    def inputs(self, operator: str) -> list[Entry]:
        """Return the tensors of the FP32 graph that the operator named ``operator`` there reads, input by input.

        If several operators have this name, their lists are joined; if none has, as for a variable, the list is empty.
        """
        return [self.source(e) for node, name in self._names.items() if name == operator for e in node.inputs]

    def readers(self, node: Node) -> list[Node]:
        """Return the operators of the FP32 graph that read outputs of ``node``, directly or through inserted nodes.

        Each is in the list once, in no certain order. ``node`` may be a variable or an inserted node too.
        """
        found: list[Node] = []
        stack = [node]
        while stack:
            users = self._users.get(stack.pop(), [])
            found += [user for user in users if user in self._names]
            stack += [user for user in users if user not in self._names]
        return list(dict.fromkeys(found))

    def readers_of(self, variable: str) -> list[Node]:
        """Return the FP32 graph's operators that read the variable of this name, directly or through inserted nodes.

        It is the list that ``readers`` returns for the variable; empty if the graph has no such variable.
        """
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
            return Observed(node, name, self.original_op(made), low, False, inserted, False, label=name)
        index = place.number or 0
        if index >= len(node.inputs) or not self._differentiable[node.inputs[index].node]:
            return None
        senders = self.readers(node) if inserted else [node]
        receiver = self.source(node.inputs[index]).node
        made = (senders or [receiver])[0]
        low = any(map(self.is_low, [receiver, *senders]))
        of_output = node.attrs.get(MARK) == "head"
        names = [*(["the loss"] if of_output else []), *map(self.original_name, senders)]
        label = f"{', '.join(names) or 'the loss'} -> {self.original_name(receiver)}"
        return Observed(node, self.original_name(made), self.original_op(made), low, True, inserted, of_output, label)


_A_SUM = Observed(Node("add_n", SUM), SUM, "add_n", False, True, True, False, SUM)
