"""``explain``: per node the dtype and the reason, the casts, and what was left alone. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Iterable, Iterator

import mxnet as mx
from mxnet.gluon import Block

from ..gluon import doors
from ..graph import Entry, Graph
from ..lower import device_of
from ..plan import Plan, decide
from ..policy import Policy, as_policy
from ..rewrite import FULL, insert_casts, strip
from ..rules import Kind
from .render import render

__all__ = ["CastReport", "Explanation", "GraphReport", "NodeReport", "explain"]

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class NodeReport:
    """One operator: the dtype it computes in, why, and how many of its inputs are cast for it."""

    name: str
    op: str
    dtype: str
    reason: str
    casts: int
    left_alone: bool


@dataclass(frozen=True)
class CastReport:
    """One cast: of which tensor, to which dtype. ``bytes``: read and written once, None without shapes."""

    tensor: str
    dtype: str
    bytes: int | None


@dataclass(frozen=True)
class GraphReport:
    """One graph: of a Symbol, or of one block for one training mode."""

    name: str
    training: bool | None
    device: str
    policy: Policy
    nodes: tuple[NodeReport, ...]
    casts: tuple[CastReport, ...]
    low_params: tuple[str, ...]
    full_params: tuple[str, ...]
    unmatched: tuple[str, ...]

    @property
    def cast_bytes(self) -> int | None:
        """Bytes that one forward moves for casts, None without shapes."""
        sizes = [cast.bytes for cast in self.casts]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def num_low(self) -> int:
        """Operators that compute in the compute dtype."""
        return sum(node.dtype == self.policy.compute for node in self.nodes)


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``print`` it, or read ``graphs``.

    ``unconverted``: names of blocks that run as Python and stay FP32.
    """

    graphs: tuple[GraphReport, ...]
    unconverted: tuple[str, ...] = ()

    @property
    def num_casts(self) -> int:
        """Casts in one forward: of the training graphs where there are some."""
        return sum(len(graph.casts) for graph in self._current())

    @property
    def cast_bytes(self) -> int | None:
        """Bytes that one forward moves for casts, None without shapes."""
        sizes = [graph.cast_bytes for graph in self._current()]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """All operators of those graphs."""
        return tuple(node for graph in self._current() for node in graph.nodes)

    def _current(self) -> tuple[GraphReport, ...]:
        return tuple(g for g in self.graphs if g.training) or self.graphs

    def __str__(self) -> str:
        return render(self)


def explain(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy | None = None,
    exclude: Iterable[str] = (),
    ctx: mx.Context | None = None,
    **shapes: tuple[int, ...],
) -> Explanation:
    """What mxmp decided for each operator of a converted net, or would decide for a Symbol.

    Parameters
    ----------
    target : Block or Symbol
        A net that ``convert`` returned, or an FP32 Symbol.
    *inputs : NDArray
        For a net: called once with them if it has not been called yet.
    policy, exclude, ctx
        For a Symbol: as for ``cast_symbol``.
    **shapes : tuple of int
        For a Symbol: input shapes, to count bytes; for example ``data=(32, 3, 224, 224)``.

    Raises
    ------
    ValueError
        The net is not converted, or was never called and no inputs are given.
    """
    if isinstance(target, mx.sym.Symbol):
        graph = strip(Graph.from_symbol(target))
        plan = decide(graph, as_policy(policy or "float16", exclude), device_of(ctx), keep_output_names=True)
        return Explanation((_report(target.name or "symbol", None, plan, shapes),))
    if not isinstance(target, Block):
        raise TypeError(f"explain takes a gluon Block or a Symbol, got {type(target).__name__}")
    if policy is not None or shapes:
        raise ValueError("policy and shapes are for Symbols: a net is explained as it was converted")
    if not any(doors(target)):
        raise ValueError(f"{target.name!r} is not converted: call mxmp.convert(net) first, or explain a Symbol")
    reports = tuple(_graphs(target))
    if not reports and inputs:
        target(*inputs)
        reports = tuple(_graphs(target))
    if not reports:
        raise ValueError(f"{target.name!r} has no graph yet: call it once, or pass inputs to explain(net, x)")
    return Explanation(reports, tuple(_unconverted(target)))


def _graphs(net: Block) -> Iterator[GraphReport]:
    for block, door in doors(net):
        for key, built in door.graphs.items():
            yield _report(block.name, key.training, built.plan, built.shapes)


def _unconverted(net: Block) -> Iterator[str]:
    converted = {id(block) for block, _ in doors(net)}
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in converted:
            yield block.name
            stack.extend(block._children.values())


def _report(name: str, training: bool | None, plan: Plan, shapes: dict) -> GraphReport:
    rewritten = insert_casts(plan)
    cast_inputs = set(rewritten.casts)
    nodes = []
    for new, old in rewritten.source.items():
        decision = plan.decisions.get(old)
        if decision is not None:
            nodes.append(
                NodeReport(
                    old.name,
                    old.op,
                    plan.policy.compute if decision.low else FULL,
                    decision.reason,
                    sum(entry.node in cast_inputs for entry in new.inputs),
                    decision.rule.kind is Kind.ALONE,
                )
            )
    variables = [node for node in plan.graph.nodes() if node.is_variable]
    low = {node.name for node in plan.low_variables}
    return GraphReport(
        name,
        training,
        plan.device,
        plan.policy,
        tuple(nodes),
        tuple(_casts(rewritten.casts, rewritten.graph, plan.policy.compute, shapes)),
        tuple(sorted(low)),
        tuple(node.name for node in variables if node.name not in low),
        plan.unmatched,
    )


def _casts(casts: list, graph: Graph, compute: str, shapes: dict) -> Iterator[CastReport]:
    sizes: list[int | None] = [None] * len(casts)
    if casts and shapes:
        symbol = Graph([Entry(c) for c in casts], graph.attrs, numpy=graph.numpy).to_symbol()
        known = {k: v for k, v in shapes.items() if k in symbol.list_inputs()}
        _, found, _ = symbol.infer_shape_partial(**known)
        each = _ITEMSIZE[compute] + _ITEMSIZE[FULL]
        sizes = [prod(shape) * each if shape and all(shape) else None for shape in found]
    for cast, size in zip(casts, sizes):
        entry = cast.inputs[0]
        suffix = f"[{entry.index}]" if entry.index else ""
        yield CastReport(entry.node.name + suffix, cast.attrs["dtype"], size)
