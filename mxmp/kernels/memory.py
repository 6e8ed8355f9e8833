"""How MXNet plans the memory of a graph: the order of gradients, and tensors that share memory."""

from __future__ import annotations

import os
from functools import lru_cache

import mxnet as mx

from ..messages.callers import warn_user
from ..precision.casts import is_ours
from ..precision.graph import Graph, Node
from ..precision.subgraphs import control_flow

# MXNet gives a tensor the memory of one that is no longer read, if that is at most so many times larger or smaller
# (src/nnvm/plan_memory.cc); 0 stands for never. It reads the variable when it plans a graph.
MATCH_RANGE = "NNVM_EXEC_MATCH_RANGE"


def keep_memory_apart(graph: Graph) -> list[Node]:
    """Let no tensors share memory in graphs that MXNet plans from now on, if this one has loops; return its loops."""
    loops = control_flow(graph)
    if not loops or MATCH_RANGE in os.environ:
        return loops
    if mx.context.num_gpus():  # the variable stands for the whole process: it would cost the GPU's memory too
        _warn_of_shared_memory()
    else:
        mx.nd.waitall()  # oneDNN reads the environment in the engine's threads: beside a write, glibc crashes
        os.environ[MATCH_RANGE] = "0"
    return loops


@lru_cache(maxsize=None)
def _warn_of_shared_memory() -> None:
    warn_user(
        "a loop or branch (foreach, while_loop, cond) on a CPU: MXNet may read its inputs before they are computed, in "
        f"FP32 too. Set {MATCH_RANGE}=0 in the environment if you need its results; mxmp does so where there is no "
        "GPU, whose memory it would cost"
    )


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
