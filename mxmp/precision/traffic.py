"""Computes how many bytes the casts of a plan move in one forward."""

from __future__ import annotations

from math import prod
from typing import Mapping, NamedTuple

from .casts import FULL, CastGraph, insert_casts
from .graph import Entry, Graph, output_shapes
from .plan import PlannedGraph

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class CastSize(NamedTuple):
    """One cast of a graph, and how many bytes it reads and writes together in one forward."""

    tensor: str  # "fc", or "split[1]" for the second output of "split"
    dtype: str
    bytes: int | None  # None where the shape is not known


def casts_left(planned: PlannedGraph, fitted: CastGraph) -> CastGraph:
    """Return ``planned`` with casts, and in its list those left in ``fitted``: kernels of the device cast inside."""
    casted, left = insert_casts(planned), set(fitted.graph.nodes())
    casted.casts = [cast for cast, same in zip(casted.casts, fitted.casts) if same in left]
    return casted


def cast_sizes(casted: CastGraph, shapes: Mapping[str, tuple]) -> list[CastSize]:
    """Return the size of each of ``casted.casts``, as far as it follows from the inputs' ``shapes``.
    Raises ``MXNetError`` if these contradict the graph."""
    casts = casted.casts
    sizes: list[int | None] = [None] * len(casts)
    if casts and shapes:
        heads = Graph([Entry(c) for c in casts], casted.graph.attrs, numpy=casted.graph.numpy)
        each = _ITEMSIZE[casted.compute] + _ITEMSIZE[FULL]
        sizes = [
            prod(shape) * each if shape and all(shape) else None for shape in output_shapes(heads.to_symbol(), shapes)
        ]
    return [CastSize(_name(cast.inputs[0]), cast.attrs["dtype"], size) for cast, size in zip(casts, sizes)]


def _name(entry: Entry) -> str:
    return entry.node.name + (f"[{entry.index}]" if entry.index else "")
