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
    """What was decided for one operator.

    Attributes
    ----------
    name, op : str
        Name and type in the FP32 graph; within the body of control flow ``"loop/name"``.
    dtype : str
        The dtype that the operator computes in: the compute dtype or ``"float32"``.
    reason : str
        Why, in one line.
    casts : int
        How many of its inputs come from a cast that mxmp inserted.
    left_alone : bool
        True if the operator's rule is ``ALONE``: its inputs arrive as in the FP32 graph, because they are indices,
        random numbers or sparse, or because the operator is custom.
    workarounds : tuple of str
        The names of the workarounds for faults of the device's kernels that are applied to the operator.
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
    """What was decided for one graph: that of a Symbol, of a Module or bucket, or of one block for one training mode.

    Attributes
    ----------
    name : str
        The name of the Symbol, block or module; of a BucketingModule with the key of the bucket.
    training : bool or None
        Whether the graph runs in training or in inference; None for a Symbol.
    plan : Plan
        The plan that the graph follows.
    nodes : tuple of NodeReport
        All operators of the graph, those in the bodies of control flow included.
    casts : tuple of CastSize
        For each cast the name of the tensor that it reads, the dtype that it makes, and the bytes that it moves (None
        if the shape is not known).
    low_params, full_params : tuple of str
        The names of the variables that are stored in the compute dtype, with FP32 master weights, and of all others.
    workarounds : mapping of str to tuple of str
        For each workaround that is applied, by its name in ``mxmp.kernels.table``, the operators and variables that
        need it.
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
        """Return the device whose kernels the graph runs on: ``"cpu"`` or ``"gpu"``."""
        return self.plan.device

    @property
    def policy(self) -> Policy:
        """Return the policy that the plan was made for."""
        return self.plan.policy

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Return the patterns in the policy's ``exclude`` that match no operator of the graph."""
        return self.plan.unmatched

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that the casts of one forward read and write; None if a shape is not known."""
        return _total(cast.bytes for cast in self.casts)

    @property
    def num_low(self) -> int:
        """Return how many operators compute in low precision."""
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
        """Return the lines of a table that counts the operators of each type, dtype and reason, largest count first."""
        alike: dict[tuple[str, str, str], list[NodeReport]] = {}
        for node in self.nodes:
            alike.setdefault((node.dtype, node.op, node.reason), []).append(node)
        order = sorted(alike.items(), key=lambda item: -len(item[1]))
        rows = [(str(len(nodes)), *key[:2], str(sum(n.casts for n in nodes)), key[2]) for key, nodes in order]
        return table([("nodes", "dtype", "operator", "casts", "reason"), *rows], "><<><")


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``print`` it, or read ``graphs``. Plain data.

    Attributes
    ----------
    graphs : tuple of GraphReport
        One report for each graph: of a net those of its blocks in training and in inference, of a BucketingModule one
        for each bucket.
    unconverted : tuple of str
        Names of the blocks of a net that run as Python and stay in FP32.
    """

    graphs: tuple[GraphReport, ...]
    unconverted: tuple[str, ...] = ()

    @property
    def num_casts(self) -> int:
        """Return the number of casts in all training graphs together; without training graphs, in all graphs.

        Of a net that is called in one way, on one device, these are the casts of one forward; of a BucketingModule,
        those of one forward in each bucket.
        """
        return sum(len(graph.casts) for graph in self._current())

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that the casts of all training graphs read and write in one forward of each graph.

        None if a shape is not known. Without training graphs, the casts of all graphs count.
        """
        return _total(graph.cast_bytes for graph in self._current())

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """Return the operators of all training graphs; without training graphs, of all graphs."""
        return tuple(node for graph in self._current() for node in graph.nodes)

    def _current(self) -> tuple[GraphReport, ...]:
        """Return the reports of the training graphs, or all reports if there are no training graphs."""
        return tuple(g for g in self.graphs if g.training) or self.graphs

    def __str__(self) -> str:
        python = [f"Runs as Python, in FP32: {some(self.unconverted)}"] if self.unconverted else []
        return "\n\n".join([*map(str, self.graphs), *python])


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of ``sizes``; None if one of them is None."""
    known = list(sizes)
    return None if None in known else sum(known)  # type: ignore[arg-type]
