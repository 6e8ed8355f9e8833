"""What there is to choose: the operators that may compute in either dtype, and the bytes that casts move."""

from __future__ import annotations

import json
from math import prod
from types import MappingProxyType
from typing import Any, Collection, Mapping

import mxnet as mx

from ..policy import Policy
from ..precision.decide import decide, may_compute_low
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Decision, Plan, PlannedGraph
from ..precision.rules import Kind, Rule
from .cut import Choice, Costs, least
from .stand_ins import with_stand_ins

__all__ = ["Task", "cast_bytes", "shapes_of", "signature"]

_CAST = 4 + 2  # bytes read and written per value
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Task:
    """A graph, a policy, and the plans among which one can be chosen.

    Parameters
    ----------
    slow_too : bool
        For ``may_compute_low``.
    left_out : mapping of str to str
        Operators that stay in FP32, by name, with the reason.

    Attributes
    ----------
    rules : Plan
        The plan by the rules.
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
        left_out: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.device = device
        self.names = graph.names()
        self._storage: dict[str, Any] = {"parameters": parameters, "keep_output_names": keep_output_names}
        left = {node: left_out[name] for node, name in self.names.items() if name in left_out}
        self._left_out = {self.names[node]: Decision(node.op, False, reason) for node, reason in left.items()}
        self.rules = self._decide({})
        may = may_compute_low(graph, policy, device, keep_output_names=keep_output_names, slow_too=slow_too)
        may = {node: found for node, found in may.items() if node not in left}
        soft = _soft(graph, may) | {node for node in self.low_nodes(self.rules) if node in may}
        self._matrix = frozenset(node for node in soft if may[node][0] is Kind.LOW)
        self._planned = PlannedGraph(graph, self.rules)
        self._stored = self._may_be_stored(soft)
        self.choice = Choice(self._planned, soft, stored=self._stored)

    @property
    def rules_of(self) -> Mapping[Node, Rule]:
        """The table entry of the rules for every operator."""
        return self._planned.rules

    @property
    def wide(self) -> frozenset[Node]:
        """Every operator that may compute low."""
        return self.choice.free

    @property
    def narrow(self) -> frozenset[Node]:
        """Those of ``wide`` that the rules put in low precision: matrix operators."""
        return self._matrix

    def low_nodes(self, plan: Plan) -> frozenset[Node]:
        """Return the operators that compute low under a plan of this graph."""
        return frozenset(node for node, name in self.names.items() if not node.is_variable and plan.decisions[name].low)

    def plan(self, low: Collection[Node], reasons: Mapping[Node, str]) -> Plan:
        """Return the plan in which ``low``, and nothing else of the choice, computes low.

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
        return self._decide(decided)

    def least_bytes(self, shapes: Mapping[Entry, tuple[int, ...]]) -> frozenset[Node]:
        """Return the low operators of the plan whose casts move the fewest bytes forward.

        The matrix operators stay low; of equal plans it is the one with more low operators.
        """
        choice = Choice(self._planned, self.wide - self._matrix, self._matrix, self._stored)
        moved = cast_bytes(shapes)
        return least(choice, Costs({}, dict.fromkeys(choice.free, 1e-2), moved, moved))

    def _decide(self, decided: Mapping[str, Decision]) -> Plan:
        return decide(self.graph, self.policy, self.device, decided={**decided, **self._left_out}, **self._storage)

    def _may_be_stored(self, soft: Collection[Node]) -> set[Node]:
        """Return the variables that some plan of the choice stores low."""
        if not self.policy.stores_low(self.device):
            return set()
        wide = self._decide({self.names[node]: Decision(node.op, True, "") for node in soft})
        return {node for node, name in self.names.items() if node.is_variable and name in wide.low_variables}


def _soft(graph: Graph, may: Mapping[Node, tuple[Kind, Rule]]) -> frozenset[Node]:
    """Return those of ``may`` that compute on what matrix operators return, or that matrix operators read.

    A label, a mask or a position may pass through operators that follow, and rounding it would change what it says.
    So an operator that follows stays in FP32 unless all that it reads may be low, or all that reads it.
    """
    soft: set[Node] = set()
    heads = {entry.node for entry in graph.heads}
    used: dict[Node, list[tuple[Node, int]]] = {}
    for entry, users in graph.consumers().items():
        used.setdefault(entry.node, []).extend(users)
    nodes = [node for node in graph.nodes() if node in may]
    for node in nodes:
        kind, rule = may[node]
        votes = [e for i, e in enumerate(node.inputs) if i not in rule.keep and i not in rule.params]
        may_be_low = [e.node in soft and e.index not in may[e.node][1].keep_outputs for e in votes]
        if kind is Kind.LOW or (votes and all(may_be_low)):
            soft.add(node)
    for node in reversed(nodes):
        users = used.get(node, [])
        if users and node not in heads and all(user in soft and i not in may[user][1].keep for user, i in users):
            soft.add(node)
    return frozenset(soft)


def shapes_of(graph: Graph, known: Mapping[str, tuple[int, ...]]) -> dict[Entry, tuple[int, ...]]:
    """Return the shape of every tensor that is read or returned.

    Raises
    ------
    ValueError
        The known shapes of inputs do not fit, or are too few.
    """
    entries = list(dict.fromkeys([*graph.consumers(), *graph.heads]))
    symbol = with_stand_ins(Graph(entries, graph.attrs, numpy=graph.numpy)).to_symbol()
    try:
        found = symbol.infer_shape_partial(**known)[1]
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes {dict(known)} do not fit: {why}") from error
    unknown = [entry.node.name for entry, shape in zip(entries, found) if not shape or not all(shape)]
    if unknown:
        missing = [name for name in unknown if name in symbol.list_inputs()]
        raise ValueError(
            f"the shapes {dict(known)} do not say the shape of {', '.join((missing or unknown)[:5])}: give those of "
            "all inputs"
        )
    return dict(zip(entries, found))


def cast_bytes(shapes: Mapping[Entry, tuple[int, ...]]) -> dict[Entry, float]:
    """Return the bytes that a cast of each tensor reads and writes."""
    return {entry: float(_CAST * prod(shape)) for entry, shape in shapes.items()}


def signature(node: Node, shapes: Mapping[Entry, tuple[int, ...]]) -> str:
    """Return the type, attributes and shapes of an operator: others with the same run the same kernels."""
    attrs = {name: value for name, value in sorted(node.attrs.items()) if not name.startswith("__")}
    inputs = ["x".join(map(str, shapes[entry])) for entry in node.inputs]
    return f"{node.op} {json.dumps(attrs)} {' '.join(inputs)}"
