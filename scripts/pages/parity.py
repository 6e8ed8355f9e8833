"""The manual's page of parity from the results of `scripts/parity.py`: a table, the curves and the final metrics.

python scripts/make_parity_page.py        # docs/parity.md, parity-curves.png, parity-values.png from docs/parity/
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Iterator, Mapping

from parity.families import FAMILIES
from parity.run import DTYPES, RESULTS, Job, judged, load, values
from parity.verdict import Verdict

DOCS = RESULTS.parent
SUMMED_LOW = (
    *("bert_finetuning", "bert_pretraining", "convs2s", "faster_rcnn", "googlenet", "inceptionv2"),
    *("inceptionv3", "lstm_gluon", "mask_rcnn", "resnet50", "resnet50_symbolic", "resnext50", "segmentation"),
    *("speech_convolutional", "speech_recurrent", "ssd", "ssd_symbolic", "tacotron", "transformer"),
)
COLOURS = {"float32": "0.2", "float16": "tab:blue", "bfloat16": "tab:orange"}
HEAD = """<!-- Written by `python scripts/make_parity_page.py`; the figures are in parity/. -->
# FP32 = float16 = bfloat16

The promise of mixed precision is that the same hyper-parameters give the same result. Here it is tried on {families}
families of networks, each small enough for a CPU, on real data, with several seeds:

```console
$ python scripts/parity.py --list             # every family, and how far it is
$ python scripts/parity.py                    # all runs that have no result yet; may be ended and started again
$ python scripts/make_parity_page.py          # this page
```

Stated before anything was trained: two dtypes are equal in a family if the means of its metric over the seeds lie
within the larger of 0.2 points and two standard errors, paired by seed (runs of one seed share weights and data order).
Where a metric is not in points, the table names the tolerance. Where the spread over seeds is wider than the tolerance,
equals miss two standard errors by chance: of five pairs in 12 of 100 comparisons, of three in 18. A family with a miss
gets twice the seeds, once, and the verdict on all of them stands.

float32 is plain MXNet, with nothing of mxmp in it. bfloat16 runs MXNet's own kernels. **float16 is emulated**: MXNet
has no float16 kernels on a CPU, so operators compute in FP32 between the roundings of a Tensor Core. None of this has
run on a GPU. *Chance* is what a network has that learnt nothing.

Until 22 November 2026 the emulation summed the gradients of a tensor's readers in FP32, where a GPU sums in float16.
Since then the usual float16 runs were made again of {again}; the others, and those without a safeguard, are older.
"""


def main() -> None:
    results = {family: load(RESULTS, family) for family in FAMILIES}
    head = HEAD.format(families=len(FAMILIES), again=", ".join(SUMMED_LOW))
    text = "\n".join(
        [
            head,
            *summary(results),
            *table(results),
            *probes(results),
            *ablations(results),
        ]
    )
    (DOCS / "parity.md").write_text(text + "\n")
    there = {family: found for family, found in results.items() if values(found, "float32")}
    draw_curves(there, DOCS / "parity-curves.png")
    draw_values(there, DOCS / "parity-values.png")


def summary(results: Mapping[str, Any]) -> Iterator[str]:
    verdicts = [judged(family, found, dtype) for family, found in results.items() for dtype in DTYPES[1:]]
    known = [found for found in verdicts if found is not None]
    yield "## The table\n"
    yield f"{sum(found.holds for found in known)} of {len(known)} pairs of a family and a dtype are equal to float32."
    if len(known) < len(verdicts):
        missing = len(verdicts) - len(known)
        yield f"**The table is not complete**: {missing} of {len(verdicts)} pairs do not have all their seeds yet."
    for dtype in DTYPES[1:]:
        found = {family: judged(family, found, dtype) for family, found in results.items()}
        signs = [(FAMILIES[f].better == "higher") == (v.difference > 0) for f, v in found.items() if v is not None]
        yield f"{dtype} does better than float32 in {sum(signs)} families and worse in {len(signs) - sum(signs)}."
    yield "Where any change tosses a network about, as R-CNNs here, the spread is wide, and so is what is allowed."
    yield ""


def table(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| family | metric | chance | float32 | float16 | bfloat16 | float16: difference | bfloat16: difference |"
    yield "|---|---|---|---|---|---|---|---|"
    for family, found in results.items():
        any_run = next((result for result in found.values() if "metric" in result), None)
        if any_run is None:
            continue
        cells = [mean(values(found, dtype)) for dtype in DTYPES]
        cells += [told(judged(family, found, dtype)) for dtype in DTYPES[1:]]
        metric = any_run["metric"] + (", less is better" if FAMILIES[family].better == "lower" else "")
        if FAMILIES[family].tolerance != 0.2:
            metric += f"; tolerance {FAMILIES[family].tolerance:g}"
        yield f"| {family} | {metric} | {any_run['chance']:g} | {' | '.join(cells)} |"
    yield "\nMeans over seeds ± standard deviation (number of seeds). Differences: mean ± standard error, and what is"
    yield "allowed.\n"
    yield "![Training loss of all families in three dtypes](parity-curves.png)\n"
    yield "![Final metric of all families in three dtypes, a dot a seed](parity-values.png)\n"
    yield "## To run a row again\n"
    yield "With `OMP_NUM_THREADS=1`, as `scripts/parity.py` sets it, a CPU gives the same figures again.\n"
    yield "| family | command, of one dtype and seed | steps |\n|---|---|---|"
    for family, found in results.items():
        if not Job(family, "float16", 0).recipe.exists():
            continue
        steps = max((result.get("steps", 0) for result in found.values()), default=0)
        yield f"| {family} | `python {' '.join(Job(family, 'float16', 0).command)}` | {steps or 'not run yet'} |"
    yield ""


def probes(results: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (family, option, text, values(found, "float16", option), judged(family, found, "float16", option))
        for family, found in results.items()
        for option, text in FAMILIES[family].probes
    ]
    if not any(ran for *_, ran, _ in rows):
        return
    yield "## Looked into\n"
    yield "float16 in families that missed, with one thing changed, chosen after the miss was seen:\n"
    yield "| family | with | float16 | difference to float32 | |\n|---|---|---|---|---|"
    for family, option, text, ran, verdict in rows:
        yield f"| {family} | `{option}` | {mean(ran)} | {told(verdict)} | {text} |"
    yield "\nChanged after first results were seen: the recipe of bert_finetuning, which stood still in all dtypes and"
    yield "ended at the seed's luck (first seed: float32 73 %, float16 50 %, bfloat16 76 %; not in the table); and runs"
    yield "without a safeguard, of which some families have three seeds where five were planned.\n"


def ablations(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## What the safeguards are for\n"
    yield "float16 without loss scaling (`--loss-scale none`), or without masters (`--no-masters`: weights and the"
    yield "optimizer's states are rounded to float16 after each update, as MXNet's optimizers hold them with"
    yield "`multi_precision=False`; Adam then divides by second moments that underflow). All else is the same."
    yield "Small pictures have large gradients: `--loss-scale 0.01` is what float16 sees without loss scaling where the"
    yield "mean is over PSPNet's 473x473 pixels instead of 48x48, each of which has a hundredth of the gradient.\n"
    yield "| family | without | float32 | float16 | float16 without | difference |\n|---|---|---|---|---|---|"
    for family, found in results.items():
        for ablation in FAMILIES[family].ablations:
            weak = values(found, "float16", ablation)
            if weak:
                whole = [mean(values(found, dtype)) for dtype in DTYPES[:2]]
                verdict = told(judged(family, found, "float16", ablation))
                yield f"| {family} | `{ablation}` | {' | '.join(whole)} | {mean(weak)} | {verdict} |"
    yield ""


def mean(found: Mapping[int, float]) -> str:
    if not found:
        return "-"
    diverged = sum(not math.isfinite(value) for value in found.values())
    if diverged:
        return f"{diverged} of {len(found)} diverged"
    middle = fmean(found.values())
    shown = ".2f" if abs(middle) < 1e5 else ".1g"
    spread = f" ± {stdev(found.values()):{shown}}" if len(found) > 1 else ""
    return f"{middle:{shown}}{spread} ({len(found)})"


def told(found: Verdict | None) -> str:
    if found is None:
        return "-"
    if not math.isfinite(found.difference):
        return "**diverged**"
    shown = ".2f" if abs(found.difference) < 1e5 else ".1g"
    figures = f"{found.difference:+{shown}} ± {found.standard_error:{shown}}, allowed {found.bound:{shown}}"
    return figures if found.holds else f"**{figures}**"


def draw_curves(results: Mapping[str, Any], path: Path) -> None:
    """The loss of every run, a line a seed, the dtypes over each other."""
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
    """The final metric, a dot a seed and a bar at the mean."""
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-count // 4)
    figure, places = pyplot.subplots(rows, 4, figsize=(11, 0.6 + 1.9 * rows), squeeze=False, constrained_layout=True)
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


if __name__ == "__main__":
    main()
