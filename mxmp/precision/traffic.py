"""Computes how many bytes the casts of a plan move in one forward."""

from __future__ import annotations

from math import prod
from typing import Mapping, NamedTuple

from .casts import LowGraph

_BYTES = 4 + 2  # of an element in FP32 and in 16 bits: a cast reads one and writes the other


class CastSize(NamedTuple):
    """One cast of a graph, and how many bytes it reads and writes together in one forward."""

    tensor: str  # "fc", or "split[1]" for the second output of "split"
    dtype: str
    bytes: int | None  # None where the shape is not known


def cast_sizes(low: LowGraph, shapes: Mapping[str, tuple]) -> list[CastSize]:
    """Return the size of each of ``low.casts_left``, as far as it follows from the inputs' ``shapes``.
    Raises ``MXNetError`` if these contradict the graph."""
    casts = low.casts_left
    found: list[tuple] = [()] * len(casts)
    if casts and shapes:
        found = low.planned.graph.shapes_of([cast.tensor for cast in casts], shapes)
    return [
        CastSize(cast.name, cast.dtype, prod(shape) * _BYTES if shape and all(shape) else None)
        for cast, shape in zip(casts, found)
    ]
