"""The manual's page of models from the sweep's results: tables, and a picture of mxmp against perfect kernels."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator

from support.options import parse
from support.pages import filled, subplots, table
from support.results import DOCS, read
from support.zoo.catalogue import in_order
from sweep.models import DTYPES, RESULTS, bytes_hold, holds, share_holds, within

SUFFIXES = {"float16": "_norm_compute", "bfloat16": ""}


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    results = read(RESULTS)
    (DOCS / "models.md").write_text(page(results), encoding="utf-8")
    picture(results, DOCS / "models.png")


def page(results: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    models = measured(results)
    missing = len(set(in_order()) - results.keys())
    every = [(name, result, dtype) for name, result in models.items() for dtype in DTYPES]
    failing = ([f"`{n}`", d, why(r, d)] for n, r, d in every if not holds(r, d))
    second = ([f"`{n}`", d, why(r, d)] for n, r, d in every if holds(r, d) and not within(r, d))
    return filled(
        __file__,
        number=len(models),
        age=age(models),
        missing=f"The sweep is not complete: {missing} of {len(in_order())} names have no result yet." * bool(missing),
        summary=table("| float16 | bfloat16", summary(models)),
        failing=table("model | dtype |", failing),
        second=table("model | dtype |", second),
        casting=table("model | dtype | bytes cast | by `mxnet.contrib.amp`", casting_more(models)),
        kinds="\n\n".join(kinds(models)),
        left_out=table("model | why", not_measured(results)),
    )


def measured(results: dict[str, Any]) -> dict[str, Any]:
    return {name: r for name, r in results.items() if "reference" in r}


def age(models: dict[str, Any]) -> str:
    """Return how many results are of a recent version, if not all: these name the code that they measured."""
    new = sum("mxmp" in result for result in models.values())
    if new == len(models):
        return ""
    return (
        f"**{new} of {len(models)} models, with one of each family among them, are measured anew.** The others\n"
        "are older: since then casts moved right around BatchNorm in float16, and the emulation keeps in FP32\n"
        "what a GPU keeps there (`batch_dot`, `take` and others)."
    )


def summary(models: dict[str, Any]) -> Iterator[list[str]]:
    rows: dict[str, Any] = {
        "run: inference and a training step": lambda r, d: "outputs_db" in r.get(f"{d}.mxmp", {}),
        "outputs and gradients within 3 dB of perfect kernels": within,
        "**pass**: or of perfect kernels throughout, or in the mean over eight other inputs": holds,
        "the same, of those whose gradients survive perfect kernels (6 dB)": lambda r, d: (
            holds(r, d) if tells(r, d) else None
        ),
        "within 3 dB of weights only": lambda r, d: within(r, d, "control"),
        "perfect kernels within 3 dB of weights only": lambda r, d: within(r, d, "control", ours="ideal"),
        "run under `mxnet.contrib.amp`": lambda r, d: "outputs_db" in r.get(f"{d}.amp", {}),
        "within 3 dB of perfect kernels under `mxnet.contrib.amp`": lambda r, d: within(r, d, ours="amp"),
        "as large a share of the FLOPs low as under `mxnet.contrib.amp`": share_holds,
        "that share, had mxmp taken kernels that are slower than FP32's": lambda r, d: slow_too(share_holds, r, d),
        "no more bytes cast, where `mxnet.contrib.amp` computes as large a share low": bytes_hold,
        "the same, with `norm=compute` in float16": lambda r, d: bytes_hold(r, d, suffix=SUFFIXES[d]),
        "so few, had mxmp taken kernels that are slower than FP32's": lambda r, d: slow_too(
            bytes_hold, r, d, suffix=SUFFIXES[d]
        ),
    }
    for label, counts in rows.items():
        found = [[counts(r, dtype) for r in models.values()] for dtype in DTYPES]
        yield [label, *(f"{sum(map(bool, f))} of {len(f) - f.count(None)}" for f in found)]


def tells(result: dict[str, Any], dtype: str) -> bool:
    """Return whether a network's gradients are well enough conditioned, at this input's size, to compare."""
    return result.get(f"{dtype}.ideal", {}).get("gradients_db", 200) >= 6


def slow_too(holds: Callable[..., bool | None], result: dict[str, Any], dtype: str, **options: str) -> bool | None:
    """Return whether it holds, or would with kernels that are slower than FP32's."""
    by_default = holds(result, dtype, **options)
    slow = holds(result, dtype, "slow_counts", **options)
    return by_default if slow is None else by_default or slow


def why(result: dict[str, Any], dtype: str) -> str:
    ours, ideal = result.get(f"{dtype}.mxmp", {}), result.get(f"{dtype}.ideal", {})
    if "error" in ours and "error" in ideal:
        return f"perfect kernels fail as well, so that there is nothing to compare with: `{shown(ideal['error'])}`"
    if "error" in ours:
        return f"`{shown(ours['error'])}`"
    if "error" in ideal or not ideal:
        return f"no figure of perfect kernels: `{shown(ideal.get('error', 'not run'))}`"
    lacking = [
        f"{what} {ours[key]:.1f} dB, perfect kernels {ideal[key]:.1f}"
        for what, key in (("outputs", "outputs_db"), ("gradients", "gradients_db"))
        if key in ours and ours[key] < ideal[key] - 3
    ]
    rest, lag = (result.get(f"{dtype}.{stage}", {}) for stage in ("throughout", "lag"))
    if "outputs_db" in rest:
        lacking.append(f"perfect kernels throughout {figures(rest)} dB")
    if "outputs_db" in lag:
        lacking.append(f"over other inputs {figures(lag, '+')} dB from perfect kernels in the mean")
    return "; ".join(lacking) or "inference is not finite"


def figures(stage: dict[str, Any], sign: str = "") -> str:
    return ", ".join(f"{stage[key]:{sign}.1f}" for key in ("outputs_db", "gradients_db") if key in stage)


def casting_more(models: dict[str, Any]) -> Iterator[list[str]]:
    for name, result in models.items():
        for dtype, suffix in SUFFIXES.items():
            if slow_too(bytes_hold, result, dtype, suffix=suffix) is False:
                ours, theirs = result[f"{dtype}.counts"], result[f"{dtype}.amp"]["cast_bytes"]
                cast = ours[f"cast_bytes{suffix}"] - ours[f"output_bytes{suffix}"]
                yield [f"`{name}`", dtype, f"{cast:,.0f}", f"{theirs:,.0f}"]


def kinds(models: dict[str, Any]) -> Iterator[str]:
    for kind in dict.fromkeys(r["reference"]["kind"] for r in models.values()):
        group = {name: r for name, r in models.items() if r["reference"]["kind"] == kind}
        losses = ", ".join(sorted({r["reference"]["loss"] for r in group.values()}))
        yield f"### {kind}\n\nLoss: {losses.replace('_', ' ')}."
        copied = [name for name, r in group.items() if r["reference"].get("copied")]
        if copied:
            ops = ", ".join(sorted({f"`{op}`" for name in copied for op in group[name]["reference"]["copied"]}))
            text = f"With a copy before and behind each {ops}, without which MXNet's FP32 cannot train them on a CPU:"
            yield f"{text}\n{', '.join(f'`{name}`' for name in sorted(copied))}."
        head = " | float16 outputs | gradients | low | cast | bfloat16 outputs | gradients"
        yield table(
            f"{head} | amp outputs, gradients | low | cast", (cells(name, group[name]) for name in sorted(group))
        )


def cells(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield f"`{name}`"
    for dtype in DTYPES:
        stages = [result.get(f"{dtype}.{what}", {}) for what in ("mxmp", "ideal", "control")]
        for key in ("outputs_db", "gradients_db"):
            yield " / ".join(decibel(stage.get(key)) for stage in stages)
        counts, amp = result.get(f"{dtype}.counts", {}), result.get(f"{dtype}.amp", {})
        if dtype == "bfloat16":
            yield f"{decibel(amp.get('outputs_db'))}, {decibel(amp.get('gradients_db'))}"
        yield f"{percent(counts.get('low_share'))} / {percent(amp.get('low_share'))}"
        ours = [counts.get("cast_bytes")] + [counts.get("cast_bytes_norm_compute")] * (dtype == "float16")
        yield f"{', '.join(map(megabytes, ours))} / {megabytes(amp.get('cast_bytes'))}"


def not_measured(results: dict[str, Any]) -> Iterator[list[str]]:
    for name, result in results.items():
        if "left_out" in result:
            yield [f"`{name}`", result["left_out"]]
        elif "reference" not in result:
            error = result["reference_error"]
            text = shown(error if isinstance(error, str) else error["error"])
            yield [f"`{name}`", f"FP32 itself fails: `{text}`"]


def shown(error: str) -> str:
    return error.replace("|", "\\|").replace("`", "'")


def decibel(value: float | None) -> str:
    return "-" if value is None else "=" if value >= 200 else "not finite" if value <= -200 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3g}"


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw mxmp's signal-to-noise ratio over that of perfect kernels, a dot a model."""
    figure, axes = subplots(2, 2, figsize=(9, 9.6), constrained_layout=True)
    figure.suptitle(
        "Signal-to-noise ratio against FP32 on a CPU, a dot for each model with figures of both\n"
        "Across: FP32 kernels, and only what matrix operators read and write is rounded. Up: mxmp.\n"
        "Grey band: within 3 dB; above it mxmp is better. float16 is emulated.",
        fontsize=10,
    )
    for column, dtype in enumerate(DTYPES):
        for line, key in enumerate(("outputs_db", "gradients_db")):
            plot = axes[line][column]
            pairs = [
                (ideal[key], ours[key])
                for r in measured(results).values()
                for ideal, ours in [(r.get(f"{dtype}.ideal", {}), r.get(f"{dtype}.mxmp", {}))]
                if -200 < ideal.get(key, 200) < 200 and key in ours
            ]
            low, high = -10, 90 if dtype == "float16" else 70
            plot.fill_between([low, high], [low - 3, high - 3], [low + 3, high + 3], color="0.9")
            plot.scatter(*zip(*pairs), s=9, alpha=0.6, color="tab:blue" if line else "tab:green")
            lag = median(ours - ideal for ideal, ours in pairs)
            plot.set(xlim=(low, high), ylim=(low, high), aspect="equal")
            plot.set(xlabel="only matrix operators round, dB", ylabel="with mxmp, dB")
            number = f"{len(pairs)} of {len(measured(results))} models"
            plot.set_title(f"{dtype}, {key[:-3]}: {number}, median {round(lag, 1) + 0:+.1f} dB", fontsize=10)
    figure.savefig(path, dpi=90)
