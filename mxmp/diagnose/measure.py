"""From a graph and its plan to a report."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Iterator

from ..precision.casts import FULL, insert_casts
from ..precision.graph import Entry, Graph
from ..precision.plan import Plan, PlannedGraph, rule_under
from ..precision.rules import Kind
from ..precision.subgraphs import bodies
from .report import CastReport, GraphReport, NodeReport

__all__ = ["measure"]

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


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
    )


def _inside(graph: Graph, plan: Plan, shapes: dict, prefix: str = "") -> tuple[list[NodeReport], list[CastReport]]:
    """Operators and casts of a graph, those in the bodies of control flow too."""
    casted = insert_casts(PlannedGraph(graph, plan))
    ours = set(casted.casts)
    names = graph.names()
    casts = [
        replace(cast, tensor=prefix + cast.tensor)
        for cast in _casts(casted.casts, casted.graph, plan.policy.compute, shapes)
    ]
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


def _casts(casts: list, graph: Graph, compute: str, shapes: dict) -> Iterator[CastReport]:
    sizes: list[int | None] = [None] * len(casts)
    if casts and shapes:
        symbol = Graph([Entry(c) for c in casts], graph.attrs, numpy=graph.numpy).to_symbol()
        known = {k: v for k, v in shapes.items() if k in symbol.list_inputs()}
        _, found, _ = symbol.infer_shape_partial(**known)
        each = _ITEMSIZE[compute] + _ITEMSIZE[FULL]
        sizes = [prod(shape) * each if shape and all(shape) else None for shape in found]
    for cast, size in zip(casts, sizes):
        entry = cast.inputs[0]
        suffix = f"[{entry.index}]" if entry.index else ""
        yield CastReport(entry.node.name + suffix, cast.attrs["dtype"], size)
