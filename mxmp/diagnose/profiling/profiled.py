"""What ``profile`` reads from a file, as plain data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Iterable, NamedTuple, TypeVar

from .kernels import BULK, KINDS, MATRIX, TENSOR, reads_low

__all__ = ["Event", "KernelReport", "OperatorReport", "ProfileReport", "gather"]

_Report = TypeVar("_Report", bound="ProfileReport")


class Event(NamedTuple):
    """One run of a kernel or an operator. ``operator``: of MXNet's that it belongs to, empty where unknown."""

    name: str
    operator: str
    kind: str
    seconds: float
    device: str


@dataclass(frozen=True)
class KernelReport:
    """All runs of one kernel for one operator on one device.

    Attributes
    ----------
    name, device : str
    operator : str
        Of MXNet's, as its profiler calls it; empty where the file does not say.
    kind : {"tensor", "matrix", "cast", "other", "bulk"}
        On Tensor Cores, a product without, a cast, or anything else; of MXNet's profiler also operators that ran
        as one, whose kind cannot be told.
    calls : int
    seconds : float
        Of all calls together.
    """

    name: str
    operator: str
    kind: str
    device: str
    calls: int
    seconds: float

    @property
    def missed(self) -> bool:
        """A product that reads low precision and does not run on Tensor Cores."""
        return self.kind == MATRIX and reads_low(self.name)


@dataclass(frozen=True)
class OperatorReport:
    """All kernels of one operator; ``seconds`` by kind."""

    name: str
    calls: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class ProfileReport:
    """What ``profile`` read.

    Attributes
    ----------
    source : str
        ``"Nsight Systems"``, ``"Nsight Compute"`` or ``"MXNet"``.
    path : str
    kernels : tuple of KernelReport
        Longest first; operators where the file has no kernels.
    knows_kernels : bool
        Whether the file says which kernels ran. MXNet's profiler only knows operators: nothing of it can be told
        to run on Tensor Cores or not.
    """

    source: str
    path: str
    kernels: tuple[KernelReport, ...]
    knows_kernels: bool

    @property
    def seconds(self) -> float:
        """Of all kernels, those that ran at the same time added up."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({kernel.device for kernel in self.kernels}))

    def share(self, kind: str) -> float:
        """Share of the time in kernels of a kind: ``"tensor"``, ``"matrix"``, ``"cast"``, ``"other"`` or ``"bulk"``.

        Raises
        ------
        ValueError
            Another kind, or ``"tensor"`` of a profile without kernels.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        if kind == TENSOR and not self.knows_kernels:
            raise ValueError(f"{self.source}'s profiler does not say which kernels ran: use Nsight Systems")
        return sum(k.seconds for k in self.kernels if k.kind == kind) / self.seconds if self.seconds else 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that can be in it: without kernels none is known to be on Tensor Cores."""
        kinds = KINDS if self.knows_kernels else KINDS[1:]
        return tuple(kind for kind in kinds if kind != BULK or any(kernel.kind == BULK for kernel in self.kernels))

    @property
    def missed(self) -> tuple[KernelReport, ...]:
        """Products that read low precision and do not run on Tensor Cores, longest first."""
        return tuple(kernel for kernel in self.kernels if kernel.missed)

    @property
    def operators(self) -> tuple[OperatorReport, ...]:
        """By operator of MXNet's, longest first; by kernel where the file does not say."""
        seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
        calls: dict[str, int] = defaultdict(int)
        for kernel in self.kernels:
            name = kernel.operator or kernel.name
            seconds[name][kernel.kind] += kernel.seconds
            calls[name] += kernel.calls
        found = [OperatorReport(name, calls[name], seconds[name]) for name in seconds]
        return tuple(sorted(found, key=lambda operator: -operator.total))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[_Report], raw: dict[str, Any]) -> _Report:
        """The inverse of ``to_dict``."""
        return cls(**{**raw, "kernels": tuple(KernelReport(**kernel) for kernel in raw["kernels"])})


def gather(events: Iterable[Event]) -> tuple[KernelReport, ...]:
    """Equal runs together, longest first."""
    seconds: dict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for event in events:
        key = event.name, event.operator, event.kind, event.device
        seconds[key] += event.seconds
        calls[key] += 1
    found = [KernelReport(*key, calls=calls[key], seconds=total) for key, total in seconds.items()]
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))
