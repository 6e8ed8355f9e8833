"""Graphs whose random numbers stand still: drawn once, by a generator of audit's own, and read as constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

import numpy as np

from ...frontend import ReplayedGraph
from ...precision.casts import strip
from ...precision.graph import Entry, Graph, Node, output_shapes
from ...precision.plan import Decision, Plan

_UNIFORM = {"_random_uniform", "random_uniform", "uniform", "_random_uniform_like"}
_NORMAL = {"_random_normal", "random_normal", "normal", "_random_normal_like"}
_DROPOUT = {"Dropout": "broadcast_mul", "_npx_dropout": "_npi_multiply"}
_PREFIX = "mxmp_drawn_"


def stilled(graph: ReplayedGraph, shapes: Mapping[str, tuple], seed: int) -> tuple[Graph, Plan, dict[str, np.ndarray]]:
    """Return a copy of the FP32 graph without random operators, its plan, and the values of the variables it adds.
    ``shapes`` are those of all variables.
    """
    made = strip(Graph.from_symbol(graph.symbol))
    names, decisions = made.names(), dict(graph.plan.decisions)
    drawn: dict[str, np.ndarray] = {}
    # Not MXNet's generators: their state cannot be read or restored.
    rng = np.random.RandomState(seed)
    for node, name in names.items():
        if node.op == "RNN":
            node.attrs["p"] = "0"
        elif node.op in _DROPOUT:
            keep = 1 - float(node.attrs.get("p", 0.5))
            active = keep < 1 and (graph.training or node.attrs.get("mode") == "always")
            shape = _with_axes(_shape(made, node.inputs[0], shapes), node.attrs.get("axes", "()"))
            mask = rng.uniform(size=shape) < keep if active else np.ones(shape)
            drawn[_PREFIX + name] = mask / (keep if active else 1)
            decisions[name] = replace(decisions[name], op=_DROPOUT[node.op])
            node.op, node.attrs = _DROPOUT[node.op], {k: v for k, v in node.attrs.items() if k.startswith("__")}
            node.inputs = (*node.inputs, Entry(Node("null", _PREFIX + name)))
        elif node.op in _UNIFORM | _NORMAL:
            low, high = (float(node.attrs.get(key, default)) for key, default in _bounds(node.op))
            shape = _shape(made, Entry(node), shapes)
            drawn[_PREFIX + name] = (
                rng.uniform(low, high, shape) if node.op in _UNIFORM else rng.normal(low, high, shape)
            )
            del decisions[name]
            node.op, node.name, node.attrs, node.inputs = "null", _PREFIX + name, {}, ()
        elif node.op.startswith(("_random_", "_sample_", "random_", "sample_")) and "_pdf_" not in node.op:
            raise ValueError(f"{name!r} ({node.op}) draws random numbers that audit cannot hold still between replays")
    return made, replace(graph.plan, decisions=decisions), {k: v.astype(np.float32) for k, v in drawn.items()}


def _bounds(op: str) -> tuple[tuple[str, float], tuple[str, float]]:
    return (("low", 0.0), ("high", 1.0)) if op in _UNIFORM else (("loc", 0.0), ("scale", 1.0))


def _shape(graph: Graph, entry: Entry, shapes: Mapping[str, tuple]) -> tuple:
    return output_shapes(Graph([entry], graph.attrs, numpy=graph.numpy).to_symbol(), shapes)[0]


def _with_axes(shape: tuple, axes: str) -> tuple:
    """Return the shape of a dropout mask, of size 1 along ``axes``, a tuple as text."""
    shared = {int(axis) for axis in axes.strip("()[] ").split(",") if axis.strip()}
    return tuple(1 if i in shared else size for i, size in enumerate(shape))


def in_fp32(plan: Plan, low: Any) -> Plan:
    """Return ``plan`` with only the operators for which ``low(name)`` is True in low precision, parameters in FP32."""
    why = "audit"
    decisions = {
        name: d if not d.low or low(name) else Decision(d.op, False, why) for name, d in plan.decisions.items()
    }
    policy = replace(plan.policy, params="float32", exclude=())
    return replace(plan, policy=policy, decisions=decisions, low_variables=frozenset(), tuned=None)
