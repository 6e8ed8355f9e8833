"""The manual's page of models from the sweep's results: tables, and a picture of mxmp against perfect kernels."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator

from support.pages import subplots, table
from support.results import DOCS, read
from sweep.models import DTYPES, RESULTS, bytes_hold, holds, share_holds, within
from zoo.catalogue import in_order

SUFFIXES = {"float16": "_norm_compute", "bfloat16": ""}
HEAD = """<!-- Written by `python scripts/dev.py pages models`; the figures are in models.json. -->
# Every model, measured

Every model of GluonCV, GluonNLP and MXNet's own zoos in both dtypes: inference, and a training step with its real loss.

```console
$ python scripts/dev.py sweep models      # all that have no result yet; may be ended and started again
$ python scripts/dev.py pages models      # this page
```

Measured on a CPU against FP32 as the signal-to-noise ratio in dB, of the outputs (the worst one) and of the
parameters' gradients (the median over parameters). Higher is better, and 6 dB is one bit. Weights are random,
running statistics are those of a few batches, inputs are as small as each network allows: the figures compare roundings
on one network, not networks. Three figures stand side by side:

- **mxmp**, by default settings;
- **perfect kernels**: FP32 kernels, where whatever a matrix operator reads or writes is rounded to the dtype, and the
  gradients at the same places: each reader's, and their sum. Made without mxmp;
- **weights only**: FP32 with nothing but its weights rounded. No computation in the dtype comes near it in a deep
  network, not perfect kernels either, for activations are rounded as well.

A recurrent cell is mostly pointwise operators. mxmp computes those between low operators low, as other libraries do,
and perfect kernels leave that rounding out. So what is further off is compared with **perfect kernels throughout** too:
pointwise operators and norms write rounded values where all that they read is rounded. And one input may be chance, so
what is off from both is measured on eight other inputs, of which the mean counts.

Small inputs leave batch norms few values, and through many of them even the gradients of perfect kernels are noise in
some networks; the table counts those apart. Detectors end in a ranking, on which no two roundings agree: their outputs
are those in training, and R-CNN's proposals are boxes around the true ones. float16 is emulated on a CPU; casts and
FLOPs of float16 are those of a GPU's graph.

Casts of a network's outputs are left out beside `mxnet.contrib.amp`, which returns low outputs where mxmp returns FP32.
mxmp takes no bfloat16 kernel that is slower than FP32's with casts around it: those of `clip`, and of depthwise
convolutions and BatchNorm whose channels make no blocks of 16. Where it therefore computes less low or casts more, its
graph with those kernels is counted too.
"""


def main(arguments: list[str] | None = None) -> None:
    results = read(RESULTS)
    parts = (summary, failures, casting_more, tables, not_measured)
    text = "\n".join([HEAD, *(line for part in parts for line in part(results))])
    (DOCS / "models.md").write_text(text + "\n")
    picture(results, DOCS / "models.png")


def measured(results: dict[str, Any]) -> dict[str, Any]:
    return {name: r for name, r in results.items() if "reference" in r}


def summary(results: dict[str, Any]) -> Iterator[str]:
    models = measured(results)
    yield f"## {len(models)} models\n"
    missing = len(set(in_order()) - results.keys())
    if missing:
        yield f"The sweep is not complete: {missing} of {len(in_order())} names have no result yet.\n"
    yield "![SQNR of gradients by mxmp against perfect kernels](models.png)\n"
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
    found = {label: [[counts(r, d) for r in models.values()] for d in DTYPES] for label, counts in rows.items()}
    cells = (
        [label, *(f"{sum(map(bool, f))} of {len(f) - f.count(None)}" for f in both)] for label, both in found.items()
    )
    yield from table("| float16 | bfloat16", cells)
    for dtype in DTYPES:
        errors = Counter(alike(r.get(f"{dtype}.amp", {}).get("error", "")) for r in models.values())
        del errors[""]
        if errors:
            yield f"`mxnet.contrib.amp` in {dtype} fails with:\n"
            yield from (f"- {count}: `{shown(error)}`" for error, count in errors.most_common())
            yield ""


def alike(error: str) -> str:
    """Return it without what differs from one network to the next: names of its operators, numbers, times."""
    error = re.sub(r"\[\d\d:\d\d:\d\d\] ", "", error)
    error = re.sub(r"Error in operator \w+", "Error in operator ...", error)
    error = re.sub(r"Incompatible attr in node .*", "Incompatible attr in node ...", error)
    error = re.sub(r"(expected|got) data type \w+", r"\1 another data type", error)
    return re.sub(r"(data|for input )\d+", r"\1N", error)


def tells(result: dict[str, Any], dtype: str) -> bool:
    """Return whether a network's gradients are well enough conditioned, at this input's size, to compare."""
    return result.get(f"{dtype}.ideal", {}).get("gradients_db", 200) >= 6


def slow_too(holds: Callable[..., bool | None], result: dict[str, Any], dtype: str, **options: str) -> bool | None:
    """Return whether it holds, or would with kernels that are slower than FP32's."""
    by_default = holds(result, dtype, **options)
    slow = holds(result, dtype, "slow_counts", **options)
    return by_default if slow is None else by_default or slow


def failures(results: dict[str, Any]) -> Iterator[str]:
    models = measured(results)
    for title, chosen in {
        "What does not pass": lambda r, d: not holds(r, d),
        "What passes by the second look": lambda r, d: holds(r, d) and not within(r, d),
    }.items():
        yield f"## {title}\n"
        yield from table(
            "model | dtype |", ([f"`{n}`", d, why(r, d)] for n, r in models.items() for d in DTYPES if chosen(r, d))
        )


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


def casting_more(results: dict[str, Any]) -> Iterator[str]:
    yield "## What casts more than under `mxnet.contrib.amp`, slower kernels or not\n"
    yield "With `norm=compute` in float16. `softsign` and `Swish` stay FP32 in bfloat16, for their kernels truncate"
    yield "([kernels](kernels.md)); DANet reads a tensor through several reshapes, each of which is cast; a loop hands"
    yield "its state on in FP32.\n"
    rows = []
    for name, result in measured(results).items():
        for dtype, suffix in SUFFIXES.items():
            if slow_too(bytes_hold, result, dtype, suffix=suffix) is False:
                ours, theirs = result[f"{dtype}.counts"], result[f"{dtype}.amp"]["cast_bytes"]
                cast = ours[f"cast_bytes{suffix}"] - ours[f"output_bytes{suffix}"]
                rows.append([f"`{name}`", dtype, f"{cast:,.0f}", f"{theirs:,.0f}"])
    yield from table("model | dtype | bytes cast | by `mxnet.contrib.amp`", rows)


def tables(results: dict[str, Any]) -> Iterator[str]:
    models = measured(results)
    yield "## All models\n"
    yield "Outputs and gradients: mxmp / perfect kernels / weights only, in dB. Low: share of the matrix FLOPs, mxmp /"
    yield "`mxnet.contrib.amp`, per cent. Cast: MB moved by casts in one forward, mxmp (float16: by default, with"
    yield "`norm=compute`) / `mxnet.contrib.amp`; - where it fails before its graph is built.\n"
    for kind in dict.fromkeys(r["reference"]["kind"] for r in models.values()):
        group = {name: r for name, r in models.items() if r["reference"]["kind"] == kind}
        losses = ", ".join(sorted({r["reference"]["loss"] for r in group.values()}))
        yield f"### {kind}\n\nLoss: {losses.replace('_', ' ')}.\n"
        copied = [name for name, r in group.items() if r["reference"].get("copied")]
        if copied:
            ops = ", ".join(sorted({f"`{op}`" for name in copied for op in group[name]["reference"]["copied"]}))
            yield f"With a copy before and behind each {ops}, without which MXNet's FP32 cannot train them on a CPU:"
            yield f"{', '.join(f'`{name}`' for name in sorted(copied))}.\n"
        head = " | float16 outputs | gradients | low | cast | bfloat16 outputs | gradients"
        yield from table(
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


def not_measured(results: dict[str, Any]) -> Iterator[str]:
    yield "## Not measured\n"
    rows = {name: result.get("left_out") for name, result in results.items()}
    for name, result in results.items():
        if "left_out" not in result and "reference" not in result:
            error = result["reference_error"]
            rows[name] = f"FP32 itself fails: `{shown(error if isinstance(error, str) else error['error'])}`"
    yield from table("model | why", ([f"`{name}`", why] for name, why in rows.items() if why))


def shown(error: str) -> str:
    return error.replace("|", "\\|").replace("`", "'")


def decibel(value: float | None) -> str:
    return "-" if value is None else "=" if value >= 200 else "not finite" if value <= -200 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3g}"


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw mxmp's SQNR over that of perfect kernels, a dot a model."""
    figure, axes = subplots(2, 2, figsize=(9, 8.5), constrained_layout=True)
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
            plot.set(xlabel="perfect kernels, dB", ylabel="mxmp, dB")
            plot.set_title(f"{dtype}, {key[:-3]}: {len(pairs)} models, median {lag:+.1f} dB", fontsize=10)
    figure.savefig(path, dpi=90)
