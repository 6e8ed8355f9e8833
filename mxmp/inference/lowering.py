"""A graph for inference in bfloat16: weights are stored in bfloat16, and fused operators have one dtype."""

from __future__ import annotations

from typing import Collection

from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import source_of
from ..precision.decide import decide
from ..precision.graph import Graph
from ..precision.plan import Decision
from .folding import Params, fold_constants
from .fusing import fuse, inner_operators

__all__ = ["lower"]

_POLICY = Policy("bfloat16")


def lower(
    graph: Graph, params: Params, full: Collection[str] = (), *, quantizable: bool = False
) -> tuple[Graph, Params]:
    """Return a fused copy of an FP32 graph, and its parameters, in bfloat16 where the rules call that safe.

    Outputs are FP32. Weights of bfloat16 operators are bfloat16 arrays, so nothing casts them in a run.

    Parameters
    ----------
    graph, params
        The FP32 graph and its parameters by name. BatchNorm is folded (``fold_norms``); nothing is fused yet.
    full : collection of str
        Names of operators that stay in FP32. Operators that MXNet fuses with one of them stay in FP32 too.
    quantizable : bool
        Fuse only operators that INT8 kernels can compute together (see ``fuse``).
    """
    groups = [inner_operators(node) for node in fuse(graph, quantizable=quantizable).nodes() if not node.is_variable]
    names = {name: node for node, name in graph.names().items()}
    kept = {name for group in groups if set(group) & set(full) for name in group}
    decided = {name: Decision(names[name].op, False, "kept in FP32 for accuracy") for name in kept}
    plan = decide(graph, _POLICY, "cpu", parameters=params, keep_output_names=True, decided=decided)
    for layer, *others in groups:
        # clip's own bfloat16 kernel is slow and truncates the bounds. Fused with a layer, oneDNN computes it in FP32.
        clips = [name for name in others if names[name].op == "clip" and plan.decisions[layer].low]
        decided.update({name: Decision("clip", True, "fused with the layer before it") for name in clips})
    plan = decide(graph, _POLICY, "cpu", parameters=params, keep_output_names=True, decided=decided)
    unasked = {node.name: "null" for node in graph.nodes() if node.is_variable}
    casted = emitted(graph, plan, unasked, large_inputs=True)
    for clip in casted.workarounds.get("clip_by_bounds", ()):
        source = casted.source[clip]
        if len(next(group for group in groups if source.name in group)) > 1:
            clip.op, clip.attrs, clip.inputs = source.op, dict(source.attrs), [source_of(clip.inputs[0])]
    lowered, values = fold_constants(casted.graph, params)
    fused = fuse(lowered, quantizable=quantizable)
    for node in fused.nodes():
        node.attrs = {name: value for name, value in node.attrs.items() if not name.startswith("__mxmp")}
    return fused, values
