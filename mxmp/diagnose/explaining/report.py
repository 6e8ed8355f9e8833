"""The result of ``explain``, as plain data, and its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping

from ...policy import Policy
from ...precision.plan import Plan
from ...precision.traffic import CastSize
from ..shared.report import some, table

__all__ = ["Explanation", "GraphReport", "NodeReport"]


@dataclass(frozen=True)
class NodeReport:
    """One operator: the dtype it computes in, why, and how many of its inputs are cast for it.

    ``workarounds``: the names of the workarounds for faults of the device's kernels that are applied to it.
    """

    name: str
    op: str
    dtype: str
    reason: str
    casts: int
    left_alone: bool
    workarounds: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """One graph and the Plan that it runs by: of a Symbol, or of one block for one training mode.

    ``workarounds``: by the name of each workaround that is applied (``mxmp.kernels.table``), the operators and
    variables that need it.
    """

    name: str
    training: bool | None
    plan: Plan
    nodes: tuple[NodeReport, ...]
    casts: tuple[CastSize, ...]
    low_params: tuple[str, ...]
    full_params: tuple[str, ...]
    workarounds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Return ``"cpu"`` or ``"gpu"``, on whose kernels the graph runs."""
        return self.plan.device

    @property
    def policy(self) -> Policy:
        """Return the policy that the plan was made for."""
        return self.plan.policy

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Return the patterns of ``exclude`` that matched nothing."""
        return self.plan.unmatched

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that one forward moves for casts, None without shapes."""
        return _total(cast.bytes for cast in self.casts)

    @property
    def num_low(self) -> int:
        """Return how many operators compute in the low dtype."""
        return sum(node.dtype == self.policy.compute for node in self.nodes)

    def __str__(self) -> str:
        mode = {None: "", True: ", training", False: ", inference"}[self.training]
        size, compute = self.cast_bytes, self.policy.compute
        moved = "" if size is None else f", {size / 2**20:.1f} MiB read and written per forward"
        lines = [
            f"{self.name} ({self.policy}, {self.device}{mode})",
            f"  {self.num_low} of {len(self.nodes)} operators in {compute}, {len(self.casts)} casts{moved}",
            "",
            *self._table(),
        ]
        for title, names in (
            (f"Stored in {compute} with FP32 masters", self.low_params),
            ("Left alone", [node.name for node in self.nodes if node.left_alone]),
            ("exclude matched nothing", self.unmatched),
        ):
            lines += ["", f"  {title}: {some(names)}"] if names else []
        if self.workarounds:
            rows = [(name, str(len(nodes)), some(nodes, 3)) for name, nodes in self.workarounds.items()]
            lines += ["", *table([("workaround for the kernels", "places", "for"), *rows], "<><")]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return one line per operator type, dtype and reason, most frequent first."""
        alike: dict[tuple[str, str, str], list[NodeReport]] = {}
        for node in self.nodes:
            alike.setdefault((node.dtype, node.op, node.reason), []).append(node)
        order = sorted(alike.items(), key=lambda item: -len(item[1]))
        rows = [(str(len(nodes)), *key[:2], str(sum(n.casts for n in nodes)), key[2]) for key, nodes in order]
        return table([("nodes", "dtype", "operator", "casts", "reason"), *rows], "><<><")


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``print`` it, or read ``graphs``.

    ``unconverted``: names of blocks that run as Python and stay FP32.
    """

    graphs: tuple[GraphReport, ...]
    unconverted: tuple[str, ...] = ()

    @property
    def num_casts(self) -> int:
        """Return the number of casts in one forward: of the training graphs where there are some."""
        return sum(len(graph.casts) for graph in self._current())

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that one forward moves for casts, None without shapes."""
        return _total(graph.cast_bytes for graph in self._current())

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """Return all operators of those graphs."""
        return tuple(node for graph in self._current() for node in graph.nodes)

    def _current(self) -> tuple[GraphReport, ...]:
        return tuple(g for g in self.graphs if g.training) or self.graphs

    def __str__(self) -> str:
        python = [f"Runs as Python, in FP32: {some(self.unconverted)}"] if self.unconverted else []
        return "\n\n".join([*map(str, self.graphs), *python])


def _total(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(known)  # type: ignore[arg-type]
