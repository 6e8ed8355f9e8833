"""What a graph computes and moves, counted from shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from mxmp.diagnose.advising.flops import Tensor, shaped_nodes
from mxmp.precision._mxnet import numpy_dtype
from mxmp.precision.casts import is_ours
from mxmp.precision.graph import Entry, Graph

_LOW = ("float16", "bfloat16")
_CASTS = ("amp_cast", "Cast", "amp_multicast")


@dataclass
class Counts:
    """FLOPs of matrix operators in one forward, those that read low inputs, casts and the bytes that they move.

    ``output_bytes``: of those, what the casts of the graph's own outputs move.
    """

    flops: float = 0.0
    low_flops: float = 0.0
    casts: int = 0
    cast_bytes: float = 0.0
    output_bytes: float = 0.0

    def add(self, other: Counts) -> None:
        self.flops += other.flops
        self.low_flops += other.low_flops
        self.casts += other.casts
        self.cast_bytes += other.cast_bytes
        self.output_bytes += other.output_bytes


def count(graph: Graph, known: Mapping[str, Tensor]) -> Counts:
    """Count a graph, given shapes and dtypes of its inputs; mxmp's and ``mxnet.contrib.amp``'s alike."""
    total = Counts()
    seen: set[tuple[Entry, str]] = set()
    outputs = {entry.node for entry in graph.heads}
    for step in shaped_nodes(graph, known):
        if step.node.op in _CASTS:
            for entry, before, after in zip(step.node.inputs, step.ins, step.outs):
                if before is None or after is None or before.dtype == after.dtype or (entry, after.dtype) in seen:
                    continue  # MXNet computes equal ones once
                seen.add((entry, after.dtype))
                total.casts += 1
                itemsizes = sum(numpy_dtype(each.dtype).itemsize for each in (before, after))
                moved = before.size * itemsizes * step.times
                total.cast_bytes += moved
                total.output_bytes += moved * (step.node in outputs)
        found = None if is_ours(step.node) else step.products()
        if found is not None:
            total.flops += found.flops * step.times
            low = step.ins[0] is not None and step.ins[0].dtype in _LOW
            total.low_flops += found.flops * step.times * low
    return total
