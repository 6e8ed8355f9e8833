"""What the casts of a plan move in one forward, and the policy that would move less."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import prod
from typing import Mapping, NamedTuple

import mxnet as mx

from ..policy import Policy
from .casts import FULL, CastGraph, insert_casts
from .decide import decide
from .graph import Entry, Graph, output_shapes
from .plan import Plan, PlannedGraph
from .rules import RULES, Kind

__all__ = ["CastSize", "Remedy", "RemedyLog", "cast_sizes", "remedy"]

logger = logging.getLogger("mxmp")

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# What casts may move more than those of the remedy, as a share of what the FP32 operators write: below it, the gain
# is not worth a line of the user's time.
_WORTH_SAYING = 0.1


class CastSize(NamedTuple):
    """One cast: of which tensor, to which dtype. ``bytes``: read and written once, None without shapes."""

    tensor: str
    dtype: str
    bytes: int | None


@dataclass(frozen=True)
class Remedy:
    """A policy whose casts move much less than those of the one in force.

    Attributes
    ----------
    policy : Policy
        The one in force but for ``norm``.
    num_casts, casts_now : int
        How many casts a forward takes by it, and takes now.
    cast_bytes, bytes_now : int or None
        What they read and write; None where shapes are not known.
    written : int or None
        What the operators of the FP32 graph write in a forward, for comparison.
    """

    policy: Policy
    num_casts: int
    casts_now: int
    cast_bytes: int | None = None
    bytes_now: int | None = None
    written: int | None = None

    def __str__(self) -> str:
        names = [name for name, policy in Policy.recipes().items() if policy == self.policy]
        name = names[0] if names else str(self.policy)
        how = f"norm={self.policy.norm} (policy {name!r})"
        if self.cast_bytes is None or self.bytes_now is None:
            return f"{how} takes {self.num_casts} casts instead of {self.casts_now}"
        return f"{how} casts {_gib(self.cast_bytes)} instead of {_gib(self.bytes_now)}"


def remedy(graph: Graph, plan: Plan, shapes: Mapping[str, tuple]) -> Remedy | None:
    """What to do about the casts around batch normalisation; None where there are none, or not enough to matter.

    Enough: they move more than a tenth of what the operators of ``graph``, an FP32 graph, write. Without
    ``shapes`` of its inputs: they are more than half of all casts. Where float16 is emulated there is nothing to
    gain. What the bodies of control flow cast is not counted.
    """
    norms = (node for node in graph.nodes() if node.op in RULES and RULES[node.op].kind is Kind.NORM)
    if not _may_gain(plan) or next(norms, None) is None:
        return None
    other = replace(plan.policy, norm="compute")
    # What is stored low stays what it is: the same weights need casts.
    instead = decide(graph, other, plan.device, parameters=(), stored_low=plan.low_variables)
    now, then = (cast_sizes(insert_casts(PlannedGraph(graph, each)), shapes) for each in (plan, instead))
    bytes_now, bytes_then, written = _total(now), _total(then), _written(graph, shapes) if shapes else None
    if bytes_now is None or bytes_then is None or not written:
        return Remedy(other, len(then), len(now)) if 2 * len(then) < len(now) else None
    if bytes_now - bytes_then <= _WORTH_SAYING * written:
        return None
    return Remedy(other, len(then), len(now), bytes_then, bytes_now, written)


def _may_gain(plan: Plan) -> bool:
    """Whether there are casts around norms, of kernels that compute in the dtype."""
    native = plan.device == "gpu" or plan.policy.compute == "bfloat16"
    return native and plan.policy.norm != "compute"


class RemedyLog:
    """Tells of a remedy in one line of the log, once."""

    def __init__(self) -> None:
        self._told = False

    def note(self, name: str, symbol: mx.sym.Symbol, plan: Plan, shapes: Mapping[str, tuple]) -> None:
        """``symbol``, the FP32 graph of what is called ``name``, runs by ``plan`` on these shapes."""
        if self._told or not _may_gain(plan):
            return
        found = remedy(Graph.from_symbol(symbol), plan, shapes)
        if found is not None:
            self._told = True
            logger.warning("%r: %s, in every forward", name, found)


def cast_sizes(casted: CastGraph, shapes: Mapping[str, tuple]) -> list[CastSize]:
    """The casts of a graph, given shapes of its inputs."""
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


def _total(casts: list[CastSize]) -> int | None:
    sizes = [cast.bytes for cast in casts]
    return None if None in sizes else sum(sizes)  # type: ignore[arg-type]


def _written(graph: Graph, shapes: Mapping[str, tuple]) -> int:
    """Bytes of the first output of every operator, in FP32; those of unknown shape are left out."""
    heads = [Entry(node) for node in graph.nodes() if not node.is_variable]
    found = output_shapes(Graph(heads, graph.attrs, numpy=graph.numpy).to_symbol(), shapes)
    return sum(prod(shape) * _ITEMSIZE[FULL] for shape in found if shape and all(shape))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:.2f} MiB"
