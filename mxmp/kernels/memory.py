"""The order in which MXNet computes gradients, on which the memory of a backward depends."""

from __future__ import annotations

from ..precision.casts import is_ours
from ..precision.graph import Graph


def write_gradients_early(graph: Graph) -> None:
    """Reverse the order of a training graph's variables, in place, so that its backward needs less memory.

    Variables are data and parameters. MXNet computes their gradients in the order of the variables
    (src/executor/exec_pass.h: xs; nnvm orders a backward depth first from its outputs). The gradient of the first
    weight comes first, and needs the backward of all layers; until then the gradients of all other weights wait in low
    precision, and only then are cast to FP32. In the reversed order, each gradient is cast when its layer is done
    (figures: docs/benchmarks.md, "Peak memory").

    To reverse the order, the first variable gets all others as control dependencies, from the last to the second: MXNet
    orders these before it. The graph is left as it is if at most one variable is read by inserted nodes, such as casts.
    Callers must bind variables by name; ``mx.mod.Module`` binds parameters by their order, so modules cannot use this.
    It is for a CPU: on a GPU MXNet's pointwise fusion ends the process where variables have control dependencies.
    """
    inputs = [node for node in graph.nodes() if node.is_variable]
    cast = {entry.node for node in graph.nodes() if is_ours(node) for entry in node.inputs if entry.node.is_variable}
    if len(cast) > 1:
        first, *others = inputs
        first.control_deps = others[::-1]
