"""The graph in bfloat16, for fusion: weights are cast once, and what MXNet fuses with a layer has the layer's dtype."""

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
    """Return the graph, fused, and its parameters, in bfloat16 where the rules call it safe; outputs are FP32.

    Parameters
    ----------
    graph, params
        In FP32, folded, not fused.
    full : collection of str
        Operators that stay FP32, with what is fused with them.
    quantizable : bool
        See ``fuse``.
    """
    groups = [inner_operators(node) for node in fuse(graph, quantizable=quantizable).nodes() if not node.is_variable]
    names = {name: node for node, name in graph.names().items()}
    kept = {name for group in groups if set(group) & set(full) for name in group}
    decided = {name: Decision(names[name].op, False, "kept in FP32 for accuracy") for name in kept}
    plan = decide(graph, _POLICY, "cpu", parameters=params, keep_output_names=True, decided=decided)
    for layer, *others in groups:
        # Alone clip is slow in bfloat16, and its bounds are truncated; oneDNN computes it within the layer, in FP32.
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
