"""What looking inside finds, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ...policy import Policy
from ...precision.plan import Plan
from ...precision.traffic import Remedy

__all__ = ["CastReport", "GraphReport", "NodeReport"]


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
    """One graph and the Plan that it runs by: of a Symbol, or of one block for one training mode.

    ``remedy``: the policy that would cast much less, where there is one.
    """

    name: str
    training: bool | None
    plan: Plan
    nodes: tuple[NodeReport, ...]
    casts: tuple[CastReport, ...]
    low_params: tuple[str, ...]
    full_params: tuple[str, ...]
    remedy: Remedy | None = None

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"gpu"``: whose kernels the graph meets."""
        return self.plan.device

    @property
    def policy(self) -> Policy:
        """What the plan was made for."""
        return self.plan.policy

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Patterns of ``exclude`` that matched nothing."""
        return self.plan.unmatched

    @property
    def cast_bytes(self) -> int | None:
        """Bytes that one forward moves for casts, None without shapes."""
        sizes = [cast.bytes for cast in self.casts]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def num_low(self) -> int:
        """Operators that compute in the compute dtype."""
        return sum(node.dtype == self.policy.compute for node in self.nodes)
