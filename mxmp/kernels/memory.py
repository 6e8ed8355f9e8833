"""The order in which MXNet computes gradients, on which the memory of a backward depends."""

from __future__ import annotations

from ..precision.casts import is_ours
from ..precision.graph import Graph


def write_gradients_early(graph: Graph) -> None:
    """Reverse the order of the inputs of a training graph, in place, so that its backward needs less memory.

    MXNet computes the gradients of a graph's inputs in the order of the inputs (src/executor/exec_pass.h: xs; nnvm
    orders a backward depth first from its outputs). The gradient of the first weight comes first, and needs the
    backward of all layers; until then the gradients of all other weights wait in low precision, and only then are cast
    to FP32. In the reversed order, each gradient is cast when its layer is done (figures: docs/benchmarks.md, "Peak
    memory").

    To reverse the order, the first input gets all others as control dependencies, from the last to the second: MXNet
    orders these before it. The graph is left as it is if inserted nodes, such as casts, read fewer than two inputs.
    Callers must bind inputs by name; ``mx.mod.Module`` binds parameters by their order, so modules cannot use this.
    """
    inputs = [node for node in graph.nodes() if node.is_variable]
    cast = {entry.node for node in graph.nodes() if is_ours(node) for entry in node.inputs if entry.node.is_variable}
    if len(cast) > 1:
        first, *others = inputs
        first.control_deps = others[::-1]
