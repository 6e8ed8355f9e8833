"""The manual's page of parity from the results of ``dev.py parity``: a table, the curves and the final metrics."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Iterator, Mapping

from parity.families import FAMILIES
from parity.run import DTYPES, RESULTS, Job, Verdict, judged, load, values
from support.options import parse
from support.pages import filled, subplots, table

DOCS = RESULTS.parent
COLOURS = {"float32": "0.2", "float16": "tab:blue", "bfloat16": "tab:orange"}


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    results = {family: load(RESULTS, family) for family in FAMILIES}
    commands = (
        (family, f"`python {' '.join(Job(family, 'float16', 0).command)}`", steps(found) or "not run yet")
        for family, found in results.items()
        if Job(family, "float16", 0).recipe.exists()
    )
    text = filled(
        __file__,
        families=len(FAMILIES),
        verdicts="\n".join(verdicts(results)),
        table=table(
            "family | metric | chance | float32 | float16 | bfloat16 | float16: difference | bfloat16: difference",
            means(results),
        ),
        commands=table("family | command, of one dtype and seed | steps", commands),
        probes=probes(results),
        ablations=table("family | without | float32 | float16 | float16 without | difference", ablations(results)),
    )
    (DOCS / "parity.md").write_text(text)
    there = {family: found for family, found in results.items() if values(found, "float32")}
    draw_curves(there, DOCS / "parity-curves.png")
    draw_values(there, DOCS / "parity-values.png")


def steps(found: Mapping[str, Any]) -> int:
    return max((result.get("steps", 0) for result in found.values()), default=0)


def verdicts(results: Mapping[str, Any]) -> Iterator[str]:
    found = {dtype: {f: judged(f, runs, dtype) for f, runs in results.items()} for dtype in DTYPES[1:]}
    every = [verdict for each in found.values() for verdict in each.values()]
    known = [verdict for verdict in every if verdict is not None]
    yield f"{sum(v.holds for v in known)} of {len(known)} pairs of a family and a dtype are equal to float32."
    if missing := len(every) - len(known):
        yield f"**The table is not complete**: {missing} of {len(every)} pairs do not have all their seeds yet."
    for dtype, each in found.items():
        signs = [(FAMILIES[f].better == "higher") == (v.difference > 0) for f, v in each.items() if v is not None]
        yield f"{dtype} does better than float32 in {sum(signs)} families and worse in {len(signs) - sum(signs)}."


def means(results: Mapping[str, Any]) -> Iterator[list[str]]:
    for family, found in results.items():
        any_run = next((result for result in found.values() if "metric" in result), None)
        if any_run is None:
            continue
        cells = [mean(values(found, dtype)) for dtype in DTYPES]
        cells += [shown(judged(family, found, dtype)) for dtype in DTYPES[1:]]
        metric = any_run["metric"] + (", less is better" if FAMILIES[family].better == "lower" else "")
        if FAMILIES[family].tolerance != 0.2:
            metric += f"; tolerance {FAMILIES[family].tolerance:g}"
        yield [family, metric, f"{any_run['chance']:g}", *cells]


def probes(results: Mapping[str, Any]) -> str:
    rows = [
        [family, f"`{option}`", mean(ran), shown(judged(family, found, "float16", option)), text]
        for family, found in results.items()
        for option, text in FAMILIES[family].probes
        for ran in [values(found, "float16", option)]
    ]
    return table("family | with | float16 | difference to float32 |", rows) if any(r[2] != "-" for r in rows) else ""


def ablations(results: Mapping[str, Any]) -> Iterator[list[str]]:
    for family, found in results.items():
        for ablation in FAMILIES[family].ablations:
            if weak := values(found, "float16", ablation):
                usual = [mean(values(found, dtype)) for dtype in DTYPES[:2]]
                verdict = shown(judged(family, found, "float16", ablation))
                yield [family, f"`{ablation}`", *usual, mean(weak), verdict]


def mean(found: Mapping[int, float]) -> str:
    if not found:
        return "-"
    diverged = sum(not math.isfinite(value) for value in found.values())
    if diverged:
        return f"{diverged} of {len(found)} diverged"
    middle = fmean(found.values())
    form = ".2f" if abs(middle) < 1e5 else ".1g"
    spread = f" ± {stdev(found.values()):{form}}" if len(found) > 1 else ""
    return f"{middle:{form}}{spread} ({len(found)})"


def shown(found: Verdict | None) -> str:
    if found is None:
        return "-"
    if not math.isfinite(found.difference):
        return "**diverged**"
    form = ".2f" if abs(found.difference) < 1e5 else ".1g"
    figures = f"{found.difference:+{form}} ± {found.standard_error:{form}}, allowed {found.bound:{form}}"
    return figures if found.holds else f"**{figures}**"


def draw_curves(results: Mapping[str, Any], path: Path) -> None:
    """Draw the loss of every run, a line a seed, the dtypes over each other."""
    figure, places = grid(len(results))
    for axes, (family, found) in zip(places, results.items()):
        for dtype, colour in COLOURS.items():
            for seed in values(found, dtype):
                curve = found[Job(family, dtype, seed).key]["curve"]
                axes.plot(*zip(*curve), color=colour, linewidth=0.8, alpha=0.7)
        losses = [loss for result in found.values() for _, loss in result.get("curve", ())]
        if min(losses) > 0 and max(losses) > 20 * min(losses):
            axes.set_yscale("log")
        axes.set_title(family, fontsize=9)
    finish(figure, path, "training loss over steps")


def draw_values(results: Mapping[str, Any], path: Path) -> None:
    """Draw the final metric, a dot a seed and a bar at the mean."""
    figure, places = grid(len(results))
    for axes, (family, found) in zip(places, results.items()):
        for place, (dtype, colour) in enumerate(COLOURS.items()):
            ends = [value for value in values(found, dtype).values() if math.isfinite(value)]
            axes.plot([place] * len(ends), ends, "o", color=colour, markersize=4, alpha=0.6)
            if ends:
                axes.hlines(fmean(ends), place - 0.3, place + 0.3, color=colour)
        axes.set_xticks([])
        axes.set_xlim(-0.6, 2.6)
        metric = next(result["metric"] for result in found.values() if "metric" in result)
        axes.set_title(f"{family}: {metric}", fontsize=8)
    finish(figure, path, "final metric, a dot a seed")


def grid(count: int) -> tuple[Any, Any]:
    rows = -(-count // 4)
    figure, places = subplots(rows, 4, figsize=(11, 0.6 + 1.9 * rows), squeeze=False, constrained_layout=True)
    for axes in places.flat[count:]:
        axes.set_axis_off()
    for axes in places.flat:
        axes.tick_params(labelsize=7)
    return figure, places.flat


def finish(figure: Any, path: Path, title: str) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, marker="o", markersize=4, label=dtype) for dtype, colour in COLOURS.items()]
    figure.legend(handles=lines, ncol=3, loc="outside upper right", fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=90)
