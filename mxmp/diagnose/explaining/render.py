"""Text for what ``explain`` measured."""

from __future__ import annotations

from collections import Counter
from typing import Iterable, Sequence

from .report import GraphReport

__all__ = ["render"]


def render(graphs: Sequence[GraphReport], unconverted: Sequence[str]) -> str:
    """The summary that ``print(mxmp.explain(net))`` shows."""
    parts = [_graph(graph) for graph in graphs]
    if unconverted:
        parts.append(f"Runs as Python, in FP32: {_some(unconverted)}")
    return "\n\n".join(parts)


def _graph(graph: GraphReport) -> str:
    mode = {None: "", True: ", training", False: ", inference"}[graph.training]
    size = graph.cast_bytes
    moved = "" if size is None else f", {size / 2**20:.1f} MiB read and written per forward"
    lines = [
        f"{graph.name} ({graph.policy}, {graph.device}{mode})",
        f"  {graph.num_low} of {len(graph.nodes)} operators in {graph.policy.compute}, {len(graph.casts)} casts{moved}",
        *([f"  Most of that can be saved: {graph.remedy}"] if graph.remedy else []),
        "",
        *_table(graph),
    ]
    if graph.low_params:
        lines += ["", f"  Stored in {graph.policy.compute} with FP32 masters: {_some(graph.low_params)}"]
    alone = [node.name for node in graph.nodes if node.left_alone]
    if alone:
        lines += ["", f"  Left alone: {_some(alone)}"]
    if graph.unmatched:
        lines += ["", f"  exclude matched nothing: {_some(graph.unmatched)}"]
    return "\n".join(lines)


def _table(graph: GraphReport) -> Iterable[str]:
    """One line per operator type, dtype and reason, most frequent first."""
    counts = Counter((node.dtype, node.op, node.reason) for node in graph.nodes)
    casts: Counter = Counter()
    for node in graph.nodes:
        casts[node.dtype, node.op, node.reason] += node.casts
    rows = [("nodes", "dtype", "operator", "casts", "reason")]
    rows += [(str(n), d, op, str(casts[d, op, r]), r) for (d, op, r), n in counts.most_common()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for number, dtype, op, cast, reason in rows:
        yield f"  {number:>{widths[0]}}  {dtype:<{widths[1]}}  {op:<{widths[2]}}  {cast:>{widths[3]}}  {reason}"


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
