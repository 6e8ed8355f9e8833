"""From a graph and its plan to a report."""

from __future__ import annotations

from ...precision.casts import FULL, insert_casts
from ...precision.graph import Graph
from ...precision.plan import Plan, PlannedGraph, rule_under
from ...precision.rules import Kind
from ...precision.subgraphs import bodies
from ...precision.traffic import cast_sizes, remedy
from .report import CastReport, GraphReport, NodeReport

__all__ = ["measure"]


def measure(name: str, training: bool | None, graph: Graph, plan: Plan, shapes: dict) -> GraphReport:
    """What ``plan`` does to ``graph``, an FP32 graph, and what its casts move."""
    names = graph.names()
    nodes, casts = _inside(graph, plan, shapes)
    variables = [names[node] for node in graph.nodes() if node.is_variable]
    return GraphReport(
        name,
        training,
        plan,
        tuple(nodes),
        tuple(casts),
        tuple(sorted(plan.low_variables)),
        tuple(name for name in variables if name not in plan.low_variables),
        remedy(graph, plan, shapes),
    )


def _inside(graph: Graph, plan: Plan, shapes: dict, prefix: str = "") -> tuple[list[NodeReport], list[CastReport]]:
    """Operators and casts of a graph, those in the bodies of control flow too."""
    casted = insert_casts(PlannedGraph(graph, plan))
    ours = set(casted.casts)
    names = graph.names()
    casts = [CastReport(prefix + tensor, dtype, size) for tensor, dtype, size in cast_sizes(casted, shapes)]
    nodes = []
    for new, old in casted.source.items():
        if old.is_variable:
            continue
        decision = plan.decisions[names[old]]
        nodes.append(
            NodeReport(
                prefix + old.name,
                old.op,
                plan.policy.compute if decision.low else FULL,
                decision.reason,
                sum(entry.node in ours for entry in new.inputs),
                rule_under(plan.policy, old.op).kind is Kind.ALONE,
            )
        )
        for body in bodies(old):
            inner, within = body.prefix(names[old]), plan.within(body, names[old])
            more, moved = _inside(body.graph, within, {}, prefix + inner)
            nodes += more
            casts += moved
    return nodes, casts
