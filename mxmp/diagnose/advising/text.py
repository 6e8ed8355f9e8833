"""Text for what ``advise`` found."""

from __future__ import annotations

from collections import Counter
from typing import Iterator

from .advice import AdviceReport, MatrixReport

__all__ = ["render_advice"]

_LONGEST = 20
_WORTH = 0.1  # of a matrix operator's FLOPs: padding that costs more is named, not advised


def render_advice(advice: AdviceReport) -> str:
    """What ``print(advise(net, x))`` shows."""
    gpu = advice.gpu
    lines = [
        f"{advice.name} ({advice.policy}) on {gpu.name}",
        f"  {advice.flops / 1e9:,.3f} GFLOPs of matrix products in one forward ({advice.flops / 2e9:,.3f} GMACs), "
        "about three times that in a training step",
        f"  {advice.tensor_share:.1%} of them can run on Tensor Cores, {advice.fitting_share:.1%} with all sizes "
        "multiples",
        *_gain(advice),
        "",
        *_table(advice),
    ]
    for title, found in (
        ("Sizes", _paddings(advice)),
        ("Not on Tensor Cores", _off(advice)),
        ("Products of one input that could be one", _joinable(advice)),
        ("Settings", advice.settings),
        ("In no figure, because shapes or products are not known", advice.unknown[:8]),
        ("exclude matched nothing", advice.unmatched),
    ):
        entries = list(found)
        if entries:
            lines += ["", f"  {title}", *(f"    {entry}" for entry in entries)]
    return "\n".join(lines)


def _gain(advice: AdviceReport) -> Iterator[str]:
    gpu = advice.gpu
    for baseline in dict.fromkeys(["float32", gpu.fp32_math]):
        called = "FP32" if baseline == "float32" else "TF32, which FP32 products use there"
        yield f"  Expected {advice.speed_up(baseline):.2f} times as fast as {called}"
    yield "  (a model, no measurement: Amdahl's law, every operator at the roofline, all but the products as in FP32)"
    ridges = [("float16", "float16"), *([("tf32", "TF32")] if "tf32" in gpu.tensor else []), ("float32", "FP32")]
    text = ", ".join(f"{name} {gpu.ridge(dtype):.0f}" for dtype, name in ridges)
    yield f"  Ridge points, FLOPs a byte from which on arithmetic is the limit: {text}"


def _kind(matrix: MatrixReport) -> tuple:
    return matrix.op, matrix.gemms, matrix.sizes, matrix.layout, matrix.dtype, matrix.times


def _table(advice: AdviceReport) -> Iterator[str]:
    """One line per operator and shape, most FLOPs first."""
    kinds: dict[tuple, MatrixReport] = {}
    counts: Counter = Counter()
    for matrix in advice.matrices:
        kinds.setdefault(_kind(matrix), matrix)
        counts[_kind(matrix)] += 1
    order = sorted(kinds, key=lambda kind: -kinds[kind].flops * counts[kind])
    rows = [("nodes", "operator", "M x N x K", "layout", "dtype", "FLOPs", "FLOPs/byte", "limit")]
    for kind in order[:_LONGEST]:
        matrix = kinds[kind]
        share = matrix.flops * counts[kind] / advice.flops
        math = matrix.dtype if matrix.on_tensor_cores(advice.gpu) else "float32"
        limit = "arithmetic" if matrix.intensity >= advice.gpu.ridge(math) else "memory"
        rows.append(
            (
                *(str(counts[kind]), matrix.op, _shape(matrix), matrix.layout, matrix.dtype),
                *(f"{share:.1%}", f"{matrix.intensity:.0f}", limit),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    if len(order) > _LONGEST:
        yield f"  and {len(order) - _LONGEST} more"


def _shape(matrix: MatrixReport) -> str:
    first = max(matrix.gemms, key=lambda gemm: gemm.flops, default=None)
    if first is None:
        return "-"
    times = f"{first.times} of " if first.times > 1 else ""
    more = f" and {len(matrix.gemms) - 1} more" if len(matrix.gemms) > 1 else ""
    return f"{times}{first.m} x {first.n} x {first.k}{more}"


def _paddings(advice: AdviceReport) -> Iterator[str]:
    """The same size of many operators is one line."""
    found: dict[tuple, list[MatrixReport]] = {}
    for matrix in advice.matrices:
        if not matrix.on_tensor_cores(advice.gpu):
            continue
        for padding in matrix.paddings:
            found.setdefault((padding, matrix.multiple), []).append(matrix)
    for (padding, multiple), matrices in found.items():
        more = f" and {len(matrices) - 1} more" if len(matrices) > 1 else ""
        dear = ", more than it is worth" if padding.cost > _WORTH and padding.value > multiple else ""
        yield (
            f"{matrices[0].name}{more}: {padding.what} {padding.value:,} -> {padding.to:,} "
            f"(+{_percent(padding.cost)} of its FLOPs{dear})"
        )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _off(advice: AdviceReport) -> Iterator[str]:
    reasons: dict[str, list[MatrixReport]] = {}
    for matrix in advice.matrices:
        if not matrix.on_tensor_cores(advice.gpu):
            why = "one channel a group makes no matrix" if matrix.depthwise else matrix.reason
            if matrix.dtype == "int8":
                why = f"{advice.gpu.name} has no INT8 Tensor Cores"
            reasons.setdefault(why, []).append(matrix)
    for why, matrices in reasons.items():
        share = sum(m.flops for m in matrices) / advice.flops if advice.flops else 0
        names = ", ".join(m.name for m in matrices[:3]) + (
            f" and {len(matrices) - 3} more" if len(matrices) > 3 else ""
        )
        yield f"{names} ({share:.1%} of the FLOPs): {why}"


def _joinable(advice: AdviceReport) -> Iterator[str]:
    for each in advice.joinable:
        yield f"{', '.join(each.names)}: all read {each.input}; one {each.op} with {each.outputs:,} outputs"
