"""BatchNorm in a network whose channels are the last axis: slow, or no kernel, on a GPU."""

from __future__ import annotations

from typing import Iterator

from ..precision.graph import Graph, Node
from ..precision.subgraphs import bodies

# MXNet 1.9.1, src/operator/nn/cudnn/cudnn_batch_norm-inl.h: for another axis than 1 the tensor is described to cuDNN as
# (N * H * W, C, 1, 1), and the plain functions are called, not the Ex ones. Reports of such shapes: pytorch issues
# 57034, 61587 and 32763, onnxruntime 7095; with frozen statistics 948 ms against 4.3: mxnet pull request 17368, which
# is not in 1.9.1.
WHY_SLOW = (
    "MXNet 1.9.1 hands cuDNN one row for each pixel here: others report such shapes 12 to 20 times slower, and no "
    "kernel above 880,801 rows in training and 65,535 in inference. Keep layout='NCHW' and axis=1 where there is a "
    "BatchNorm"
)
_NORMS = ("BatchNorm", "_contrib_BatchNormWithReLU")


def norms_over_rows(graph: Graph) -> list[str]:
    """Return the names of the BatchNorms of a graph, and of its bodies, whose axis is not 1."""
    nodes = list(_all(graph))
    # axis=-1 is 1 of a matrix, and another axis where a convolution or pooling has its channels last.
    is_last = any(node.attrs.get("layout", "").endswith("C") for node in nodes)
    first = ("1",) if is_last else ("1", "-1")
    return [node.name for node in nodes if node.op in _NORMS and node.attrs.get("axis", "1") not in first]


def has_norm(graph: Graph) -> bool:
    return any(node.op in _NORMS for node in _all(graph))


def _all(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes():
        yield node
        for body in bodies(node):
            yield from _all(body.graph)
