"""Graphs for inference in bfloat16 on a CPU and in float16 on a GPU, with weights that are stored so."""

from __future__ import annotations

from typing import Any, Collection, Mapping

from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import CastGraph, source_of
from ..precision.decide import decide
from ..precision.graph import TYPE_CODES, Graph, Node
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
    """Return a copy of an FP32 graph, fused by oneDNN, in bfloat16 where the rules call that safe, and its parameters.

    Outputs are FP32 unless ``policy`` leaves them in bfloat16. Weights of bfloat16 operators are stored as bfloat16
    arrays, so that they need no cast at run time.

    Parameters
    ----------
    graph, params
        The FP32 graph and its parameters by name. BatchNorm is folded (``fold_norms``); nothing is fused yet.
    full : collection of str
        Names of operators that stay in FP32. Operators that MXNet fuses with one of them stay in FP32 too.
    policy : Policy
        A policy of bfloat16, under which the rules decide.
    decided : mapping of str to Decision, optional
        Decisions of a plan, by operator name, which overrule the rules; ``full`` overrules both. Default: none.
    quantizable : bool
        True fuses only operators that one INT8 kernel can compute together, as ``quantize`` needs it. False fuses
        what ``fuse`` fuses by default.
    """
    groups = [inner_operators(node) for node in fuse(graph, quantizable=quantizable).nodes() if not node.is_variable]
    names = {name: node for node, name in graph.names().items()}
    kept = {name for group in groups if set(group) & set(full) for name in group}
    decided = {**(decided or {}), **{name: Decision(names[name].op, False, _KEPT) for name in kept}}
    plan = decide(graph, policy, "cpu", parameters=params, keep_output_names=True, decided=decided)
    for layer, *others in groups:
        # clip's own bfloat16 kernel is slow and truncates the bounds. Fused with a layer, oneDNN computes it in FP32.
        clips = [name for name in others if plan.decisions[layer].low and _holds_limits(names[name])]
        decided.update({name: Decision("clip", True, "fused with the layer before it") for name in clips})
    plan = decide(graph, policy, "cpu", parameters=params, keep_output_names=True, decided=decided)
    casted = _casted(graph, plan)
    for clip in casted.workarounds.get("clip_by_bounds", ()):
        source = casted.source[clip]
        if len(next(group for group in groups if source.name in group)) > 1:
            clip.op, clip.attrs, clip.inputs = source.op, dict(source.attrs), [source_of(clip.inputs[0])]
    lowered, values = fold_constants(casted.graph, params)
    return _without_marks(fuse(lowered, quantizable=quantizable)), values


def _holds_limits(node: Node) -> bool:
    """Return whether ``node`` is a clip whose limits bfloat16 holds, such as ReLU6."""
    return node.op == "clip" and not RULES["clip"].loses(node.attrs, "bfloat16")


def lower_to_float16(
    graph: Graph, params: Params, full: Collection[str], device: str, *, float16_sums: bool = False
) -> tuple[Graph, Params, Mapping[str, Decision]]:
    """Return a copy of an FP32 graph in float16 where the rules call that safe, its parameters, and the decisions.

    Outputs are FP32. The decisions map the name of each operator, in graph order, to a ``Decision``: whether it
    computes in float16, and why.

    Parameters
    ----------
    graph, params
        The FP32 graph and its parameters by name. BatchNorm is folded (``fold_norms``).
    full : collection of str
        Names of operators that stay in FP32.
    device : {"gpu", "cpu"}
        ``"gpu"``: weights of float16 operators are stored as float16 arrays, so that they need no cast at run time.
        ``"cpu"``: the emulation, a graph that computes on a CPU what the graph for a GPU computes there; its parameters
        are FP32.
    float16_sums : bool
        True lets float16 FullyConnected operators of the emulation sum in float16 instead of FP32. Use it with
        ``"cpu"`` only, which is not checked, and call ``sums.register`` before the graph is loaded or run.
    """
    names = {name: node for node, name in graph.names().items()}
    kept = {name: Decision(names[name].op, False, _KEPT) for name in full}
    options: dict[str, Any] = {"parameters": params, "keep_output_names": True, "exported": True}
    plan = decide(graph, _FLOAT16, "gpu", decided=kept, **options)
    if device == "cpu":
        plan = decide(graph, _FLOAT16, "cpu", decided=plan.decisions, **options)
    stored = {name: value.astype("float16") if name in plan.low_variables else value for name, value in params.items()}
    casted = _casted(graph, plan)
    lowered, values = fold_constants(casted.graph, stored)
    if float16_sums:
        with_float16_sums(lowered, {node.name for node in casted.low})
    for node in lowered.nodes():
        if node.name in plan.low_variables:
            node.attrs = {**node.attrs, "__dtype__": TYPE_CODES["float16"]}
    return _without_marks(lowered), values, plan.decisions


def _casted(graph: Graph, plan: Plan) -> CastGraph:
    """Return the graph that runs in inference by ``plan``, without workarounds for wrong gradients.

    All variables count as having no gradient (``grad_req="null"``), whatever ``graph`` declares.
    """
    not_requested = {node.name: "null" for node in graph.nodes() if node.is_variable}
    return emitted(graph, plan, not_requested, large_inputs=True)


def _without_marks(graph: Graph) -> Graph:
    """Remove, in place, all ``__mxmp...`` attributes of nodes; return the graph.

    They mark the nodes that mxmp inserted. ``strip`` removes marked nodes, and would undo the lowering.
    """
    for node in graph.nodes():
        node.attrs = {name: value for name, value in node.attrs.items() if not name.startswith("__mxmp")}
    return graph
