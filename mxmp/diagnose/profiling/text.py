"""Text for what ``profile`` read."""

from __future__ import annotations

from typing import Iterator

from .kernels import BULK, CAST, MATRIX, OTHER, TENSOR
from .profiled import ProfileReport

__all__ = ["names_of", "render_profile"]

_LONGEST = 15
_WIDTH = 72


def names_of(profile: ProfileReport) -> dict[str, str]:
    """What the kinds of a profile are called."""
    matrix = "products without" if profile.knows_kernels else "matrix operators"
    names = {TENSOR: "on Tensor Cores", MATRIX: matrix, CAST: "casts", OTHER: "everything else", BULK: "in bulk"}
    return {kind: names[kind] for kind in profile.kinds}


def render_profile(profile: ProfileReport) -> str:
    """What ``print(profile(path))`` shows."""
    calls = sum(kernel.calls for kernel in profile.kernels)
    what = "kernels" if profile.knows_kernels else "operators"
    lines = [
        f"{profile.path} ({profile.source}, {', '.join(profile.devices)}): "
        f"{profile.seconds * 1e3:,.3f} ms in {calls:,} {what}",
        *(f"  {profile.share(kind):>6.1%} {name}" for kind, name in names_of(profile).items()),
        "",
        *_table(profile),
    ]
    if profile.missed:
        lines += ["", "  Low precision, not on Tensor Cores (see advise for the shapes)"]
        lines += [
            f"    {kernel.seconds / profile.seconds:>5.1%}  {_short(kernel.name)}"
            + (f"  of {kernel.operator}" if kernel.operator else "")
            for kernel in profile.missed[:_LONGEST]
        ]
    if BULK in profile.kinds:
        # aggregate_stats makes the engine push each operator by itself (src/engine/threaded_engine.h, bulk_size).
        lines += [
            "",
            "  In bulk: MXNet ran several operators as one, and which of them took the time is not known. Record",
            "  with set_config(aggregate_stats=True, ...), for a Module with MXNET_EXEC_BULK_EXEC_TRAIN=0 and",
            "  MXNET_EXEC_BULK_EXEC_INFERENCE=0 in the environment.",
        ]
    return "\n".join(lines)


def _table(profile: ProfileReport) -> Iterator[str]:
    rows = [("share", "calls", *profile.kinds, "operator" if any(k.operator for k in profile.kernels) else "kernel")]
    for operator in profile.operators[:_LONGEST]:
        shares = (
            f"{operator.seconds[kind] / profile.seconds:.1%}" if operator.seconds[kind] else ""
            for kind in profile.kinds
        )
        total = f"{operator.total / profile.seconds:.1%}" if profile.seconds else ""
        rows.append((total, str(operator.calls), *shares, _short(operator.name)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  " + "  ".join([cell.rjust(width) for cell, width in zip(row, widths)] + [row[-1]])
    if len(profile.operators) > _LONGEST:
        yield f"  and {len(profile.operators) - _LONGEST} more"


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."
