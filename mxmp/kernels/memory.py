"""The order in which MXNet computes gradients, on which the memory of a backward depends."""

from __future__ import annotations

from ..precision.casts import is_ours
from ..precision.graph import Graph


def write_gradients_early(graph: Graph) -> None:
    """Reverse the order of the inputs of a training graph, in place, so that its backward needs less memory.

    MXNet computes the gradients of a graph's inputs in the order of the inputs (src/executor/exec_pass.h: xs; nnvm
    orders a backward depth first from its outputs). The first weight's comes first, and needs the backward of all
    layers. Only then are the gradients of the other weights cast to FP32, which all wait in low precision until then.
    From the last weight on, each is cast when its layer is done (figures: docs/benchmarks.md, "Peak memory").

    To reverse the order, the first input gets all others as control dependencies, from the last to the second: MXNet
    orders these before it. Nothing changes if fewer than two inputs are read through casts. Callers must bind inputs by
    name; ``mx.mod.Module`` binds parameters by their order, so modules cannot use this.
    """
    inputs = [node for node in graph.nodes() if node.is_variable]
    cast = {entry.node for node in graph.nodes() if is_ours(node) for entry in node.inputs if entry.node.is_variable}
    if len(cast) > 1:
        first, *others = inputs
        first.control_deps = others[::-1]
