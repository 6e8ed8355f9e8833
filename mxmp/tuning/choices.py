"""What there is to choose: the operators that may compute in either dtype, and the bytes that casts move."""

from __future__ import annotations

from math import prod
from typing import Any, Collection, Mapping

import mxnet as mx

from ..policy import Policy
from ..precision.decide import decide, may_compute_low
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Decision, Plan, PlannedGraph
from ..precision.rules import Kind, Rule
from .cut import Choice, Costs, least

__all__ = ["Task", "cast_bytes", "shapes_of"]

_CAST = 4 + 2  # bytes read and written per value


class Task:
    """A graph, a policy, and the plans among which one can be chosen; ``slow_too``: see ``missing_kernel``.

    Attributes
    ----------
    rules : Plan
        What the rules say.
    choice : Choice
        Every operator that may compute low may compute in FP32 as well.
    """

    def __init__(
        self,
        graph: Graph,
        policy: Policy,
        device: str,
        *,
        parameters: Collection[str] | None = None,
        keep_output_names: bool = False,
        slow_too: bool = False,
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.device = device
        self._storage: dict[str, Any] = {"parameters": parameters, "keep_output_names": keep_output_names}
        self.rules = decide(graph, policy, device, parameters=parameters, keep_output_names=keep_output_names)
        self.names = graph.names()
        may = may_compute_low(graph, policy, device, keep_output_names=keep_output_names, slow_too=slow_too)
        soft = _soft(graph, may) | {node for node in self.low_nodes(self.rules) if node in may}
        self._matrix = frozenset(node for node in soft if may[node][0] is Kind.LOW)
        self._planned = PlannedGraph(graph, self.rules)
        self._stored = self._may_be_stored(soft)
        self.choice = Choice(self._planned, soft, stored=self._stored)

    @property
    def rules_of(self) -> Mapping[Node, Rule]:
        """The row of the rules of every operator."""
        return self._planned.rules

    @property
    def wide(self) -> frozenset[Node]:
        """Every operator that may compute low."""
        return self.choice.free

    @property
    def narrow(self) -> frozenset[Node]:
        """The matrix operators alone."""
        return self._matrix

    def low_nodes(self, plan: Plan) -> frozenset[Node]:
        """The operators that compute low under a plan of this graph."""
        return frozenset(node for node, name in self.names.items() if not node.is_variable and plan.decisions[name].low)

    def plan(self, low: Collection[Node], reasons: Mapping[Node, str]) -> Plan:
        """The plan in which ``low``, and nothing else of the choice, computes low.

        The bodies of control flow follow the rules, unless nothing at all computes low.
        """
        decided = {}
        for node in self.choice.free:
            name = self.names[node]
            before = self.rules.decisions[name]
            if before.low is not (node in low) or node in reasons:
                decided[name] = Decision(node.op, node in low, reasons.get(node, "chosen by tuning"))
            else:
                decided[name] = before
        if not low:
            own = set(self.names.values())
            inside = {name: d for name, d in self.rules.decisions.items() if name not in own}
            decided.update({name: Decision(d.op, False, "all of the graph is FP32") for name, d in inside.items()})
        return decide(self.graph, self.policy, self.device, decided=decided, **self._storage)

    def least_bytes(self, shapes: Mapping[Entry, tuple[int, ...]]) -> frozenset[Node]:
        """Where casts move the fewest bytes forward; the matrix operators stay low, of equals the one with more low."""
        choice = Choice(self._planned, self.wide - self._matrix, self._matrix, self._stored)
        moved = cast_bytes(shapes)
        return least(choice, Costs({}, dict.fromkeys(choice.free, 1e-2), moved, moved))

    def _may_be_stored(self, soft: Collection[Node]) -> set[Node]:
        """The variables that some plan of the choice stores low."""
        if not self.policy.stores_low(self.device):
            return set()
        low = {self.names[node]: Decision(node.op, True, "") for node in soft}
        wide = decide(self.graph, self.policy, self.device, decided=low, **self._storage)
        return {node for node, name in self.names.items() if node.is_variable and name in wide.low_variables}


def _soft(graph: Graph, may: Mapping[Node, tuple[Kind, Rule]]) -> frozenset[Node]:
    """Those of ``may`` that compute on what matrix operators made, or are about to read.

    A label, a mask or a position may pass through operators that follow, and rounding it would change what it says.
    So an operator that follows stays in FP32 unless all that it reads may be low, or all that reads it.
    """
    soft: set[Node] = set()
    readers = graph.consumers()
    heads = {entry.node for entry in graph.heads}
    used: dict[Node, list[tuple[Node, int]]] = {}
    for entry, users in readers.items():
        used.setdefault(entry.node, []).extend(users)
    nodes = [node for node in graph.nodes() if node in may]
    for node in nodes:
        kind, rule = may[node]
        votes = [e for i, e in enumerate(node.inputs) if i not in rule.keep and i not in rule.params]
        if kind is Kind.LOW or (votes and all(_made_low(e, may, soft) for e in votes)):
            soft.add(node)
    for node in reversed(nodes):
        users = used.get(node, [])
        if users and node not in heads and all(user in soft and i not in may[user][1].keep for user, i in users):
            soft.add(node)
    return frozenset(soft)


def _made_low(entry: Entry, may: Mapping[Node, tuple[Kind, Rule]], soft: Collection[Node]) -> bool:
    return entry.node in soft and entry.index not in may[entry.node][1].keep_outputs


def shapes_of(graph: Graph, given: Mapping[str, tuple[int, ...]]) -> dict[Entry, tuple[int, ...]]:
    """The shape of every tensor that is read or handed out.

    Raises
    ------
    ValueError
        The given shapes do not fit, or do not say enough.
    """
    entries = list(dict.fromkeys([*graph.consumers(), *graph.heads]))
    symbol = Graph(entries, graph.attrs, numpy=graph.numpy).to_symbol()
    try:
        found = symbol.infer_shape_partial(**given)[1]
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes {dict(given)} do not fit: {why}") from error
    unknown = [entry.node.name for entry, shape in zip(entries, found) if not shape or not all(shape)]
    if unknown:
        missing = [name for name in unknown if name in symbol.list_inputs()]
        raise ValueError(
            f"the shapes {dict(given)} do not say the shape of {', '.join((missing or unknown)[:5])}: give those of "
            "all inputs"
        )
    return dict(zip(entries, found))


def cast_bytes(shapes: Mapping[Entry, tuple[int, ...]]) -> dict[Entry, float]:
    """What a cast of each tensor reads and writes."""
    return {entry: float(_CAST * prod(shape)) for entry, shape in shapes.items()}
