"""Text for what ``profile`` read."""

from __future__ import annotations

from typing import Iterator

from .kernels import CAST, KINDS, MATRIX, OTHER, TENSOR
from .profiled import ProfileReport

__all__ = ["render_profile"]

_LONGEST = 15
_WIDTH = 72
_NAMES = {TENSOR: "on Tensor Cores", MATRIX: "products without", CAST: "casts", OTHER: "everything else"}


def render_profile(profile: ProfileReport) -> str:
    """What ``print(profile(path))`` shows."""
    calls = sum(kernel.calls for kernel in profile.kernels)
    what = "kernels" if profile.knows_kernels else "operators"
    kinds = KINDS if profile.knows_kernels else (MATRIX, CAST, OTHER)
    names = _NAMES if profile.knows_kernels else {**_NAMES, MATRIX: "matrix operators"}
    lines = [
        f"{profile.path} ({profile.source}, {', '.join(profile.devices)}): "
        f"{profile.seconds * 1e3:,.3f} ms in {calls:,} {what}",
        *(f"  {profile.share(kind):>6.1%} {names[kind]}" for kind in kinds),
        "",
        *_table(profile, kinds),
    ]
    if profile.missed:
        lines += ["", "  Low precision, not on Tensor Cores (see advise for the shapes)"]
        lines += [
            f"    {kernel.seconds / profile.seconds:>5.1%}  {_short(kernel.name)}"
            + (f"  of {kernel.operator}" if kernel.operator else "")
            for kernel in profile.missed[:_LONGEST]
        ]
    bulks = [each for each in profile.operators if each.name.startswith("[") or "," in each.name.split("<")[0]]
    if bulks and not profile.knows_kernels:
        lines += ["", "  Operators ran in bulk, as one: MXNET_EXEC_BULK_EXEC_TRAIN=0 and MXNET_EXEC_BULK_EXEC_INFERENCE=0"]
        lines += ["  before the run, and hybridize() without static_alloc, tell them apart."]
    return "\n".join(lines)


def _table(profile: ProfileReport, kinds: tuple[str, ...]) -> Iterator[str]:
    rows = [("share", "calls", *kinds, "operator" if any(k.operator for k in profile.kernels) else "kernel")]
    for operator in profile.operators[:_LONGEST]:
        shares = (f"{operator.seconds[kind] / profile.seconds:.1%}" if operator.seconds[kind] else "" for kind in kinds)
        total = f"{operator.total / profile.seconds:.1%}" if profile.seconds else ""
        rows.append((total, str(operator.calls), *shares, _short(operator.name)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  " + "  ".join([cell.rjust(width) for cell, width in zip(row, widths)] + [row[-1]])
    if len(profile.operators) > _LONGEST:
        yield f"  and {len(profile.operators) - _LONGEST} more"


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."
