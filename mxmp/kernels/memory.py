"""The order in which MXNet computes gradients, on which the memory of a backward depends."""

from __future__ import annotations

from ..precision.casts import is_ours
from ..precision.graph import Graph


def write_gradients_early(graph: Graph) -> None:
    """Reverse the order of a training graph's variables, in place, so that its backward needs less memory.
    Only for a CPU, and for callers that bind variables by name: ``mx.mod.Module`` binds them by their order.
    """
    # MXNet computes gradients in the order of the variables (src/executor/exec_pass.h: xs). The first weight's needs
    # the whole backward, and all others wait for it in low precision. Reversed, each is cast when its layer is done
    # (docs/benchmarks.md, "Peak memory").
    inputs = [node for node in graph.nodes() if node.is_variable]
    cast = {entry.node for node in graph.nodes() if is_ours(node) for entry in node.inputs if entry.node.is_variable}
    if len(cast) > 1:
        first, *others = inputs
        # MXNet orders these before it. On a GPU its pointwise fusion would end the process.
        first.control_deps = others[::-1]
