"""What ``profile`` reads from a file: plain data and its text."""

from collections import Counter
from dataclasses import dataclass
from typing import Dict, Iterator, List, Tuple

from ..shared.report import Saved, table
from .kernels import BULK, CAST, KINDS, MATRIX, OTHER, TENSOR, reads_low

__all__ = ["KernelReport", "OperatorReport", "Profile"]

_LONGEST = 15
_WIDTH = 72


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

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")

    @property
    def missed(self) -> bool:
        """A product that reads low precision and does not run on Tensor Cores."""
        return self.kind == MATRIX and reads_low(self.name)


@dataclass(frozen=True)
class OperatorReport:
    """All kernels of one operator; ``seconds`` by kind."""

    name: str
    calls: int
    seconds: Dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Profile(Saved):
    """What ``profile`` read. ``print`` it, ``save`` it, or read the fields.

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

    FORMAT = "mxmp-profile-1"

    source: str
    path: str
    kernels: Tuple[KernelReport, ...]
    knows_kernels: bool

    @property
    def seconds(self) -> float:
        """Of all kernels, those that ran at the same time added up."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def devices(self) -> Tuple[str, ...]:
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
        return self.share_of(sum(k.seconds for k in self.kernels if k.kind == kind))

    def share_of(self, seconds: float) -> float:
        """What share of the time some seconds are; 0 where nothing took any time."""
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def kinds(self) -> Dict[str, str]:
        """Those that can be in it, with their names: without kernels none is known to be on Tensor Cores."""
        names = {TENSOR: "on Tensor Cores", MATRIX: "products without", CAST: "casts", OTHER: "everything else"}
        if not self.knows_kernels:
            names = {MATRIX: "matrix operators", CAST: "casts", OTHER: "everything else"}
        return {**names, **({BULK: "in bulk"} if any(kernel.kind == BULK for kernel in self.kernels) else {})}

    @property
    def missed(self) -> Tuple[KernelReport, ...]:
        """Products that read low precision and do not run on Tensor Cores, longest first."""
        return tuple(kernel for kernel in self.kernels if kernel.missed)

    @property
    def operators(self) -> Tuple[OperatorReport, ...]:
        """By operator of MXNet's, longest first; by kernel where the file does not say."""
        found: Dict[str, OperatorReport] = {}
        calls: Counter = Counter()
        for kernel in self.kernels:
            name = kernel.operator or kernel.name
            calls[name] += kernel.calls
            seconds = found[name].seconds if name in found else dict.fromkeys(KINDS, 0.0)
            seconds[kernel.kind] += kernel.seconds
            found[name] = OperatorReport(name, calls[name], seconds)
        return tuple(sorted(found.values(), key=lambda operator: -operator.total))

    def __str__(self) -> str:
        calls = sum(kernel.calls for kernel in self.kernels)
        lines = [
            f"{self.path} ({self.source}, {', '.join(self.devices)}): "
            f"{self.seconds * 1e3:,.3f} ms in {calls:,} {'kernels' if self.knows_kernels else 'operators'}",
            *(f"  {self.share(kind):>6.1%} {name}" for kind, name in self.kinds.items()),
            "",
            *self._table(),
        ]
        if self.missed:
            lines += ["", "  Low precision, not on Tensor Cores (see advise for the shapes)"]
            lines += [
                f"    {self.share_of(kernel.seconds):>5.1%}  {_short(kernel.name)}"
                + (f"  of {kernel.operator}" if kernel.operator else "")
                for kernel in self.missed[:_LONGEST]
            ]
        if BULK in self.kinds:
            # aggregate_stats makes the engine push each operator by itself (src/engine/threaded_engine.h, bulk_size).
            lines += [
                "",
                "  In bulk: MXNet ran several operators as one, and which of them took the time is not known. Record",
                "  with set_config(aggregate_stats=True, ...), for a Module with MXNET_EXEC_BULK_EXEC_TRAIN=0 and",
                "  MXNET_EXEC_BULK_EXEC_INFERENCE=0 in the environment.",
            ]
        return "\n".join(lines)

    def _table(self) -> Iterator[str]:
        named = "operator" if any(kernel.operator for kernel in self.kernels) else "kernel"
        rows: List[Tuple[str, ...]] = [("share", "calls", *self.kinds, named)]
        for operator in self.operators[:_LONGEST]:
            shares = (operator.total, *(operator.seconds[kind] for kind in self.kinds))
            total, *each = (f"{self.share_of(seconds):.1%}" if seconds else "" for seconds in shares)
            rows.append((total, str(operator.calls), *each, _short(operator.name)))
        yield from table(rows, ">" * (len(rows[0]) - 1) + "<")
        if len(self.operators) > _LONGEST:
            yield f"  and {len(self.operators) - _LONGEST} more"


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."
