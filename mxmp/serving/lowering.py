"""Graphs for inference in bfloat16 on a CPU and in float16 on a GPU, with weights that are stored so."""

from __future__ import annotations

from dataclasses import replace
from typing import Collection, Mapping

from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import LowGraph, source_of
from ..precision.decide import decide
from ..precision.graph import TYPE_CODES, Graph, Node
from ..precision.operators import Options
from ..precision.plan import Decision, Plan
from ..precision.rules import RULES
from .folding import Params, fold_constants
from .fusing import fuse, inner_operators
from .sums import with_float16_sums

_BFLOAT16, _FLOAT16 = Policy("bfloat16"), Policy("float16")
_KEPT = "kept in FP32 for accuracy"


def lower(
    graph: Graph,
    params: Params,
    full: Collection[str] = (),
    *,
    policy: Policy = _BFLOAT16,
    decided: Mapping[str, Decision] | None = None,
    quantizable: bool = False,
) -> tuple[Graph, Params]:
    """Return a copy in bfloat16 where that is safe, fused by oneDNN, with weights stored so, and its parameters.
    ``graph`` has BatchNorm folded. ``full`` overrules ``decided``, and this the rules; both go by operators' names."""
    groups = [inner_operators(node) for node in fuse(graph, quantizable=quantizable).nodes() if not node.is_variable]
    names = {name: node for node, name in graph.names().items()}
    # What MXNet fuses with an operator of ``full`` stays in FP32 too.
    kept = {name for group in groups if set(group) & set(full) for name in group}
    decided = {**(decided or {}), **{name: Decision(names[name].op, False, _KEPT) for name in kept}}
    options = Options(parameters=params, keep_output_names=True, decided=decided.copy())
    plan = decide(graph, policy, "cpu", options)
    for layer, *others in groups:
        # clip's own bfloat16 kernel is slow and truncates the bounds. Fused with a layer, oneDNN computes it in FP32.
        clips = [name for name in others if plan.decisions[layer].low and _holds_limits(names[name])]
        decided.update({name: Decision("clip", True, "fused with the layer before it") for name in clips})
    plan = decide(graph, policy, "cpu", replace(options, decided=decided))
    casted = _casted(graph, plan)
    for clip in casted.workarounds.get("clip_by_bounds", ()):
        source = casted.source[clip]
        if len(next(group for group in groups if source.name in group)) > 1:
            clip.op, clip.attrs, clip.inputs = source.op, dict(source.attrs), [source_of(clip.inputs[0])]
    lowered, values = fold_constants(casted.graph, params)
    return _without_marks(fuse(lowered, quantizable=quantizable)), values


def _holds_limits(node: Node) -> bool:
    """Return whether ``node`` is a clip whose limits bfloat16 holds, such as ReLU6."""
    return node.op == "clip" and not RULES["clip"].rounded_limit(node.attrs, "bfloat16")


def lower_to_float16(
    graph: Graph, params: Params, full: Collection[str], device: str, *, float16_sums: bool = False
) -> tuple[Graph, Params, Mapping[str, Decision]]:
    """Return a copy in float16 where that is safe, its parameters, and the decisions by operator, in graph order.
    For ``"gpu"``, weights are stored in float16. For ``"cpu"``, it is the emulation of that graph, stored in FP32."""
    names = {name: node for node, name in graph.names().items()}
    kept = {name: Decision(names[name].op, False, _KEPT) for name in full}
    options = Options(parameters=params, keep_output_names=True, exported=True, decided=kept)
    plan = decide(graph, _FLOAT16, "gpu", options)
    if device == "cpu":
        plan = decide(graph, _FLOAT16, "cpu", replace(options, decided=plan.decisions))
    stored = {name: value.astype("float16") if name in plan.low_variables else value for name, value in params.items()}
    casted = _casted(graph, plan)
    lowered, values = fold_constants(casted.graph, stored)
    if float16_sums:  # in the emulation only; ``sums.register`` comes before the graph is loaded or run
        with_float16_sums(lowered, {node.name for node in casted.low})
    for node in lowered.nodes():
        if node.name in plan.low_variables:
            node.attrs = {**node.attrs, "__dtype__": TYPE_CODES["float16"]}
    return _without_marks(lowered), values, plan.decisions


def _casted(graph: Graph, plan: Plan) -> LowGraph:
    """Return the graph of ``plan`` for inference: no variable has a gradient, so no workaround for one is needed."""
    not_requested = {node.name: "null" for node in graph.nodes() if node.is_variable}
    return emitted(graph, plan, not_requested, large_inputs=True)


def _without_marks(graph: Graph) -> Graph:
    """Remove, in place, mxmp's marks of nodes, by which ``strip`` would undo the lowering."""
    for node in graph.nodes():
        node.attrs = {name: value for name, value in node.attrs.items() if not name.startswith("__mxmp")}
    return graph
