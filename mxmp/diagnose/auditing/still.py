"""Graphs whose random numbers stand still: drawn once, by a generator of audit's own, and read as constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Mapping

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ...precision.casts import strip
from ...precision.graph import Entry, Graph, Node, output_shapes
from ...precision.missing_kernels import numbers_in
from ...precision.plan import Plan
from ...precision.rules import draws
from ...precision.subgraphs import bodies, control_flow, set_bodies
from ..networks.protocol import ReplayedGraph

_UNIFORM = {"_random_uniform", "_random_uniform_like", "_npi_uniform"}
_NORMAL = {"_random_normal", "_random_normal_like", "_npi_normal"}
_LIKE = ("_random_uniform_like", "_random_normal_like")  # an input gives the shape
_DROPOUT = {"Dropout": "broadcast_mul", "_npx_dropout": "_npi_multiply"}
_PREFIX = "mxmp_drawn_"
_RANDOM = "{!r} ({}) draws random numbers that audit cannot hold still between replays"


def stilled(graph: ReplayedGraph, inputs: Mapping[str, NDArray], seed: int) -> tuple[Graph, Plan, dict[str, NDArray]]:
    """Return a copy of the FP32 graph without random operators, its plan, and the values of the variables it adds."""
    made = strip(Graph.from_symbol(graph.symbol))
    names, decisions = made.names(), dict(graph.plan.decisions)
    variables = {**inputs, **graph.values}
    shapes, ctx = {name: array.shape for name, array in variables.items()}, next(iter(variables.values())).ctx
    drawn: dict[str, np.ndarray] = {}
    # Not MXNet's generators: their state cannot be read or restored.
    rng = np.random.RandomState(seed)
    for node in control_flow(made):
        set_bodies(node, [_without_random(body.graph) for body in bodies(node)])
    for node, name in names.items():
        _settle(node)
        if node.op in _DROPOUT:
            keep = 1 - float(node.attrs.get("p", 0.5))
            active = keep < 1 and (graph.training or node.attrs.get("mode") == "always")
            shared = numbers_in(node.attrs.get("axes"))  # the mask has size 1 along these
            whole = enumerate(_shape(made, node.inputs[0], shapes))
            shape = tuple(1 if axis in shared else size for axis, size in whole)
            mask = rng.uniform(size=shape) < keep if active else np.ones(shape)
            drawn[_PREFIX + name] = mask / (keep if active else 1)
            shapes[_PREFIX + name] = shape  # MXNet infers none through a broadcast
            decisions[name] = replace(decisions[name], op=_DROPOUT[node.op])
            node.op, node.attrs = _DROPOUT[node.op], {k: v for k, v in node.attrs.items() if k.startswith("__")}
            node.inputs = (*node.inputs, Entry(Node("null", _PREFIX + name)))
        elif node.op in _UNIFORM | _NORMAL and (node.op in _LIKE or not node.inputs):
            draw, first, second = (rng.uniform, "low", "high") if node.op in _UNIFORM else (rng.normal, "loc", "scale")
            bounds = float(node.attrs.get(first, 0)), float(node.attrs.get(second, 1))
            drawn[_PREFIX + name] = draw(*bounds, _shape(made, Entry(node), shapes))
            del decisions[name]
            node.op, node.name, node.attrs, node.inputs = "null", _PREFIX + name, {}, ()
        else:
            _refuse_random(node, name)
    arrays = {name: mx.nd.array(value, ctx=ctx, dtype="float32") for name, value in drawn.items()}
    return made, replace(graph.plan, decisions=decisions), arrays


def _without_random(body: Graph) -> Graph:
    """Return a loop's body, or a branch, without dropout: its masks would have to be inputs of each iteration."""
    for node in body.nodes():
        _settle(node)
        if node.op in _DROPOUT:
            node.attrs["p"] = "0"
        _refuse_random(node, node.name)
    for node in control_flow(body):
        set_bodies(node, [_without_random(each.graph) for each in bodies(node)])
    return body


def _settle(node: Node) -> None:
    """Let an operator draw nothing that can go on without, as in inference, and compute dense gradients."""
    if node.op == "RNN":
        node.attrs["p"] = "0"
    elif node.attrs.get("act_type") == "rrelu":
        bounds = float(node.attrs.get("lower_bound", 0.125)), float(node.attrs.get("upper_bound", 0.334))
        node.attrs.update(act_type="leaky", slope=str(sum(bounds) / 2))
    if "sparse_grad" in node.attrs:
        node.attrs["sparse_grad"] = "False"


def _refuse_random(node: Node, name: str) -> None:
    if draws(node.op, node.attrs):
        raise ValueError(_RANDOM.format(name, node.op))


def _shape(graph: Graph, entry: Entry, shapes: Mapping[str, tuple]) -> tuple:
    return output_shapes(Graph([entry], graph.attrs, numpy=graph.numpy).to_symbol(), shapes)[0]


def in_fp32(plan: Plan, low: Callable[[str], bool]) -> Plan:
    """Return ``plan`` with only the operators for which ``low(name)`` is True in low precision, parameters in FP32."""
    decisions = {name: replace(d, low=d.low and low(name)) for name, d in plan.decisions.items()}
    policy = replace(plan.policy, params="float32", exclude=())
    return replace(plan, policy=policy, decisions=decisions, low_variables=frozenset(), tuned=None)
