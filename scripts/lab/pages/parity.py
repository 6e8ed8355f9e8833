"""The manual's page of parity from the results of ``dev.py parity``: tables, forest plot and curves."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Iterator, Mapping, Sequence

from parity.beginning import BEGINNINGS, all_of
from parity.run import DTYPES, RECIPES, RESULTS, Job, judged, load, values
from parity.verdict import METRICS, Verdict, plain_mean, pooled
from support.families import FAMILIES
from support.options import parse
from support.pages import filled, subplots, table
from support.results import DOCS, FOLDER, read, write

COLOURS = {"float32": "0.2", "float16": "tab:blue", "bfloat16": "tab:orange"}
VERDICTS = {"equivalent": "tab:green", "undecided": "0.45", "different": "tab:red"}
CURVES: dict[str, dict[str, Any]] = {  # wide below narrow, so that none hides another
    "float32": {"linewidth": 4, "alpha": 0.35},
    "float16": {"linewidth": 1.4},
    "bfloat16": {"linewidth": 1.2, "linestyle": (0, (3, 2))},
}
_MARKS = {"float16": "o", "bfloat16": "s"}
WIDEST = 4  # margins that the forest plot shows to each side
SIZE = 256  # unknowns of the linear systems
REFINED = FOLDER / "refinement.json"  # what was solved; delete it to solve them anew


def main(arguments: list[str] | None = None) -> None:
    """Write the page and its pictures."""
    parse(__doc__, arguments)
    if not REFINED.exists():
        refine()
    results = {family: load(RESULTS, family) for family in FAMILIES}
    found = {dtype: judgements(results, dtype) for dtype in DTYPES[1:]}
    (DOCS / "parity.md").write_text(page(results, found))
    there = {family: runs for family, runs in results.items() if values(runs, "float32")}
    draw_forest(found, DOCS / "parity-forest.png")
    draw_curves(there, DOCS / "parity-curves.png")
    draw_large(DOCS / "parity-large.png")


def page(results: Mapping[str, Any], found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """Return the page in Markdown."""
    commands = (
        (family, f"`python {' '.join(Job(family, 'float16', 0).command)}`", steps(runs) or "not run yet")
        for family, runs in results.items()
    )
    judged_pairs = sum(map(len, found.values()))  # one in twenty of which chance alone may get wrong
    return filled(
        __file__,
        families=len(FAMILIES),
        margins=table("metric | better | margin", margins()),
        verdicts="\n".join(verdicts(found)),
        chance=f"{0.05 * judged_pairs:.1f} of {judged_pairs}",
        levels=levels(results),
        table=table(
            "family | metric | chance | float32 | dtype | value | difference | verdict | holds from", means(results)
        ),
        pooled=table("dtype | families | random-effects mean | each family counted alike", means_of_all(found)),
        beginnings=beginnings(read(BEGINNINGS)),
        commands=table("family | command, of one dtype and seed | steps", commands),
        ablations=table(
            "family | without | float32 | float16 | float16 without | difference | verdict", ablations(results)
        ),
        large=table("recipe | dtype | loss scale | steps | skipped | last loss | result", large()),
        size=SIZE,
        refinement=table(
            "condition | float16: LU alone | iterations | error | float32: LU alone | iterations | error", refined()
        ),
    )


def judgements(results: Mapping[str, Any], dtype: str) -> dict[str, Verdict]:
    """Return the verdicts on a dtype by family, of those with enough runs."""
    found = {family: judged(runs, dtype) for family, runs in results.items()}
    return {family: verdict for family, verdict in found.items() if verdict is not None}


def beginnings(known: dict[str, Any]) -> str:
    """Return the sentence on runs that begin as stored, and on those that do not."""
    every = dict(all_of(known))
    others = {run: found for run, found in every.items() if found["stored"] != found.get("now")}
    same = f"{len(every) - len(others)} of {len(every)} runs began as stored, to four digits"
    if not others:
        return f"When this was last tried, {same}."
    rows = ([run, *map(losses, (found["stored"], found.get("now", ())))] for run, found in others.items())
    return f"When this was last tried, {same}. The others:\n\n{table('run | loss, stored | loss, now', rows)}"


def losses(curve: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{loss:g}" for _, loss in curve) or "-"


def steps(found: Mapping[str, Any]) -> int:
    """Return how many steps a run has; 0 before there is one."""
    return max((result.get("steps", 0) for result in found.values()), default=0)


def margins() -> Iterator[list[str]]:
    """Yield a metric, the direction that is better, and its margin."""
    for name, metric in METRICS.items():
        size = f"{metric.margin:.0%} of FP32's mean" if metric.relative else f"{metric.margin:g}"
        yield [name, "higher" if metric.higher else "lower", size]


def verdicts(found: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """Yield a sentence for each count: what is equivalent, different, undecided, and not judged."""
    every = [verdict for each in found.values() for verdict in each.values()]
    counts = {kind: sum(verdict.kind == kind for verdict in every) for kind in VERDICTS}
    pairs = len(FAMILIES) * len(found)
    yield f"Of {pairs} pairs of a family and a dtype, **{counts['equivalent']} are equivalent** to float32,"
    worse = sum(verdict.worse for verdict in every)
    better = sum(verdict.kind in ("different", "diverged") for verdict in every) - worse
    yield f"{worse} are shown to be worse, {better} to be better, and {counts['undecided']} are undecided:"
    yield "their seeds are too few for what their recipes scatter."
    if missing := pairs - len(every):
        yield f"**The table is not complete**: {missing} pairs do not have runs of three seeds yet."
    for dtype, each in found.items():
        gains = sum(verdict.gain * verdict.difference > 0 for verdict in each.values())
        yield f"The mean of {dtype} is better than that of float32 in {gains} of {len(each)} families."


def levels(results: Mapping[str, Any]) -> str:
    """Return the sentence on FP32's worst seeds: what they gain over chance, and how far off they are."""
    worst = {}
    for family, runs in results.items():
        chance = next((run["chance"] for run in runs.values() if "chance" in run), math.nan)
        gains = [abs(value - chance) for value in values(runs, "float32").values()]
        if len(gains) > 1:
            worst[family] = min(gains) / fmean(gains), (fmean(gains) - min(gains)) / stdev(gains)
    least, far = min(worst, key=lambda family: worst[family][0]), max(far for _, far in worst.values())
    return (
        f"In float32 every seed learns: the worst gains {worst[least][0]:.0%} of what its family gains over chance in\n"
        f"the mean ({least}), and none is more than {far:.1f} standard deviations below that mean."
    )


def means(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of a family and a dtype."""
    for family, runs in results.items():
        any_run = next((result for result in runs.values() if "metric" in result), None)
        if any_run is None:
            continue
        first = [family, any_run["metric"], f"{any_run['chance']:g}", mean(values(runs, "float32"))]
        for dtype in DTYPES[1:]:
            verdict = judged(runs, dtype)
            yield [*first, dtype, mean(values(runs, dtype)), interval(verdict), shown(verdict), holds(verdict)]
            first = ["", "", "", ""]


def means_of_all(found: Mapping[str, Mapping[str, Verdict]]) -> Iterator[list[Any]]:
    """Yield the cells of a dtype's means over all families."""
    for dtype, each in found.items():
        usable = poolable(each.values())
        if len(usable) > 1:
            cells = [f"{m.mean:+.2f} ({m.low:+.2f} to {m.high:+.2f})" for m in (pooled(usable), plain_mean(usable))]
            yield [dtype, len(usable), *cells]


def poolable(verdicts: Any) -> list[Verdict]:
    """Return the verdicts that have a standardised difference: no run diverged, and the seeds differ."""
    return [verdict for verdict in verdicts if verdict.standard_error > 0 and verdict.spread > 0]


def ablations(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each run without a safeguard."""
    for family, runs in results.items():
        for ablation in FAMILIES[family].ablations:
            if weak := values(runs, "float16", ablation):
                usual = [mean(values(runs, dtype)) for dtype in DTYPES[:2]]
                verdict = judged(runs, "float16", ablation)
                yield [family, f"`{ablation}`", *usual, mean(weak), interval(verdict), shown(verdict)]


def large() -> Iterator[list[str]]:
    """Yield the cells of each long run."""
    for family, runs in large_runs().items():
        for run in runs:
            scale = run["loss_scale"] if run["dtype"] == "float16" else "-"
            results = f"{run['curve'][-1][1]:.4f}", f"{run['value']:.2f} {run['metric']}"
            yield [family, run["dtype"], scale, run["steps"], run["skipped"], *results]


def large_runs() -> dict[str, list[dict[str, Any]]]:
    """Return the results of the long runs by family; FP32's comes first."""
    runs = [read(path) for path in sorted((RESULTS / "large").glob("*.json"), reverse=True)]
    return {family: [run for run in runs if run["family"] == family] for family in sorted({r["family"] for r in runs})}


def refined() -> Iterator[list[str]]:
    """Yield the cells of each condition number, from what the recipe of refinement solved."""
    for condition, each in read(REFINED).items():
        cells = [condition]
        for first, iterations, error, holds in each:
            cells += [f"{first:.0e}", str(iterations), f"{error:.0e}"]
            cells[-2:] = cells[-2:] if holds else ["-", "**not solved**"]
        yield cells


def refine() -> None:
    """Run the recipe of refinement and keep what it solved."""
    sys.path.insert(0, str(RECIPES))
    import refinement

    found = {
        f"{condition:.0e}": [[got.first, got.iterations, got.error, bool(got.holds)] for got in each.values()]
        for condition, each in refinement.table(SIZE).items()
    }
    write(REFINED, found)


def mean(found: Mapping[int, float]) -> str:
    """Return the mean, the standard deviation and the number of seeds as text."""
    if not found:
        return "-"
    diverged = sum(not math.isfinite(value) for value in found.values())
    if diverged:
        return f"{diverged} of {len(found)} diverged"
    middle = fmean(found.values())
    form = ".2f" if abs(middle) < 1e5 else ".1g"
    spread = f" ± {stdev(found.values()):{form}}" if len(found) > 1 else ""
    return f"{middle:{form}}{spread} ({len(found)})"


def interval(found: Verdict | None) -> str:
    """Return the mean difference and its 90 % interval as text."""
    if found is None or found.kind == "diverged":
        return "-"
    form = "+.2f" if abs(found.difference) < 1e5 else "+.1g"
    low, high = found.interval(0.9)
    return f"{found.difference:{form}} ({low:{form}} to {high:{form}})"


def shown(found: Verdict | None) -> str:
    """Return the verdict as text, in bold where the dtype is different or diverged."""
    if found is None:
        return "-"
    return f"**{found.text}**" if found.kind in ("different", "diverged") else found.text


def holds(found: Verdict | None) -> str:
    """Return the smallest margin with which the pair is equivalent, as text."""
    return f"{found.holds_from:.2g}" if found and found.kind == "equivalent" else ""


def draw_forest(found: Mapping[str, Mapping[str, Verdict]], path: Path) -> None:
    """Draw each difference in margins, better to the right, and the means over all families below."""
    families = [family for family in FAMILIES if any(family in each for each in found.values())]
    height = 1.8 + 0.34 * len(families)
    figure, (above, below) = subplots(
        2, 1, figsize=(8.5, height), height_ratios=(len(families), 3), constrained_layout=True
    )
    above.axvspan(-1, 1, color="tab:green", alpha=0.1, linewidth=0)
    for place, family in enumerate(families):
        for offset, (dtype, each) in zip((-0.17, 0.17), found.items()):
            if family in each and each[family].kind != "diverged":
                draw_verdict(above, place + offset, each[family], _MARKS[dtype])
    above.set_yticks(range(len(families)), families, fontsize=8)
    above.set_ylim(len(families) - 0.5, -0.5)
    above.set_xlim(-1.05 * WIDEST, 1.05 * WIDEST)
    above.set_xlabel(
        "worse than float32   ←   difference in margins; green band: within the margin   →   better", fontsize=8
    )
    below.axvspan(-0.1, 0.1, color="tab:green", alpha=0.1, linewidth=0)
    rows: list[str] = []
    for dtype, each in found.items():
        for average, what in ((pooled, "by precision"), (plain_mean, "all alike")):
            if len(usable := poolable(each.values())) > 1:
                all_of = average(usable)
                ends = [[all_of.mean - all_of.low], [all_of.high - all_of.mean]]
                below.errorbar(all_of.mean, len(rows), xerr=ends, fmt=_MARKS[dtype], color="0.3", ms=5)
                rows.append(f"{dtype}, {what}")
    below.set_yticks(range(len(rows)), rows, fontsize=8)
    below.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    below.set_xlim(-0.4, 0.4)
    below.set_xlabel(
        "means over the families, weighed by their precision or all alike, in standard deviations of a seed,\n"
        "with 95 % intervals; band: a tenth",
        fontsize=8,
    )
    for axes in (above, below):
        axes.axvline(0, color="0.3", linewidth=0.7)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)
    figure.suptitle(
        "Result of training in float16 (emulated) and bfloat16, minus that in float32\n"
        "mean over seeds, with 90 % (thick) and 95 % (thin) intervals",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def draw_verdict(axes: Any, place: float, verdict: Verdict, marker: str) -> None:
    """Draw one line of the forest plot; an arrowhead stands where an interval leaves the picture."""
    colour = VERDICTS[verdict.kind]
    for level, width in ((0.9, 2.4), (0.95, 0.9)):
        ends = sorted(verdict.gain * end / verdict.margin for end in verdict.interval(level))
        inside = [min(max(end, -WIDEST), WIDEST) for end in ends]
        axes.plot(inside, [place] * 2, color=colour, linewidth=width)
    if ends[0] < -WIDEST:
        axes.plot([-WIDEST], [place], "<", color=colour, markersize=5)
    if ends[1] > WIDEST:
        axes.plot([WIDEST], [place], ">", color=colour, markersize=5)
    middle = verdict.gain * verdict.difference / verdict.margin
    if abs(middle) < WIDEST:
        axes.plot([middle], [place], marker, color=colour, markersize=4.5)


def legend(figure: Any) -> None:
    """Draw the legend of the forest plot: colours of verdicts, and marks of dtypes."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linewidth=2.4, label=kind) for kind, colour in VERDICTS.items()]
    lines += [Line2D([], [], color="0.3", marker=m, linewidth=0, label=dtype) for dtype, m in _MARKS.items()]
    figure.legend(handles=lines, ncol=5, loc="outside lower center", fontsize=8, frameon=False)


def draw_curves(results: Mapping[str, Any], path: Path) -> None:
    """Draw the loss of every family: the median over seeds, and the range from the lowest seed to the highest."""
    rows = -(-len(results) // 4)
    figure, places = subplots(rows, 4, figsize=(11, 0.8 + 1.9 * rows), squeeze=False, constrained_layout=True)
    for axes in places.flat[len(results) :]:
        axes.set_axis_off()
    for axes, (family, found) in zip(places.flat, results.items()):
        losses = []
        for dtype, style in CURVES.items():
            curves = [found[Job(family, dtype, seed).key]["curve"] for seed in values(found, dtype)]
            if curves:
                steps, *bounds = median_and_range(curves)
                axes.plot(steps, bounds[0], color=COLOURS[dtype], **style)
                axes.fill_between(steps, *bounds[1:], color=COLOURS[dtype], alpha=0.15, linewidth=0)
                losses += [*bounds[1], *bounds[2]]
        if min(losses) > 0 and max(losses) > 20 * min(losses):
            axes.set_yscale("log")
        axes.set_title(family, fontsize=9)
        axes.tick_params(which="both", labelsize=7)
    for dtype, style in CURVES.items():
        label = dtype + ", emulated" * (dtype == "float16")
        places.flat[0].plot([], [], color=COLOURS[dtype], label=label, **style)
    figure.legend(ncol=3, loc="outside upper right", fontsize=8, frameon=False, handlelength=3)
    figure.suptitle("Training loss: median over seeds (line) and their range (band)", x=0.01, ha="left", fontsize=10)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("training loss (logarithmic where it falls to a twentieth)", fontsize=9)
    figure.savefig(path, dpi=90)


def median_and_range(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[Any, Any, Any, Any]:
    """Return the steps of the longest curve, and the median, lowest and highest loss of all there."""
    import numpy as np

    steps = [step for step, _ in max(curves, key=len)]
    rows = [np.interp(steps, [step for step, _ in curve], [loss for _, loss in curve]) for curve in curves]
    losses = np.array(rows)
    return steps, np.median(losses, axis=0), losses.min(axis=0), losses.max(axis=0)


def draw_large(path: Path) -> None:
    """Draw the loss of the long runs, a family beside the other."""
    families = large_runs()
    figure, places = subplots(1, len(families), figsize=(10, 3.5), squeeze=False, constrained_layout=True)
    figure.suptitle(
        "Gradients as small as in a real training: float16 (emulated) with and without a loss scale", fontsize=10
    )
    for axes, (family, runs) in zip(places.flat, families.items()):
        for run in runs:
            unscaled = run["loss_scale"] == "none"
            style = {"linestyle": "--" if unscaled else "-", "label": run["dtype"] + ", no loss scale" * unscaled}
            if run["dtype"] == "float32":  # the others lie on it
                style.update(linewidth=6, alpha=0.3)
            axes.plot(*zip(*run["curve"]), color=COLOURS[run["dtype"]], **style)
        axes.set_yscale("log", subs=(2, 3, 4, 6))
        axes.set_title(family, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("training loss (lower is better)", fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(which="both", labelsize=7)
    places.flat[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)
