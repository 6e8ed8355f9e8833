"""The manual's page of benchmarks from what bench_models.py measured: tables, a picture, and a roofline.

python scripts/make_benchmarks_page.py      # docs/model-benchmarks.md and .png from docs/model-benchmarks.json
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Iterator

from bench.models import RESULTS, TASKS
from bench.turns import quartiles, spread

LABELS = {  # by variant: in words, and a colour (Okabe and Ito's)
    "rules": ("mxmp, rules", "#0072B2"),
    "tuned": ("mxmp, tuned", "#009E73"),
    "contrib.amp": ("`mxnet.contrib.amp`", "#000000"),
    "torch.autocast": ("PyTorch's autocast", "#D55E00"),
}
HEAD = """<!-- Written by `python scripts/make_benchmarks_page.py`; the figures are in model-benchmarks.json. -->
# Models, timed

```console
$ python scripts/bench_models.py               # all that have no result yet; may be ended and started again
$ python scripts/make_benchmarks_page.py       # this page
```

Whole steps, each to its end (`mx.nd.waitall()`), of processes that take turns. Ratios are taken round by round; the
median, with the quartiles in brackets. Above 1 is faster than FP32.
"""
MATRIX = ("Convolution", "Deconvolution", "FullyConnected", "RNN", "dot", "batch_dot")


def main() -> None:
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(page(results))
    picture({key: each for key, each in results.items() if each["dtype"] == "bfloat16"}, RESULTS.with_suffix(".png"))


def page(everything: dict[str, Any]) -> str:
    results = {key: each for key, each in everything.items() if each["dtype"] == "bfloat16"}
    parts = [HEAD, *machines(results), f"![Step time against FP32]({RESULTS.stem}.png)\n"]
    for task in TASKS:
        parts += times(results, task)
    parts += emulated([each for each in everything.values() if each["dtype"] == "float16"])
    parts += [*tuning(results), *memory(results), *torch(results), *roofline(results), *failures(results)]
    return "\n".join(parts) + "\n"


def machines(results: dict[str, Any]) -> Iterator[str]:
    for cpu, threads, dtype in sorted({(r["cpu"], r["threads"], r["dtype"]) for r in results.values()}):
        yield f"- {cpu}, {threads} OpenMP thread{'s' if threads > 1 else ''}, {dtype}"
    yield ""


# -- Figures ----------------------------------------------------------------------------------------


def of_task(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return [result for result in results.values() if result["task"] == task]


def shape(result: dict[str, Any]) -> str:
    return f"**{result['title']}**, {result['batch']} of {result['size']}"


def ratios(result: dict[str, Any], variant: str, to: str = "float32") -> list[float]:
    """``to``'s time over the variant's, by round; none where one has no figures."""
    both = [result["variants"].get(name, {}).get("seconds", []) for name in (to, variant)]
    return [a / b for a, b in zip(*both) if a is not None and b is not None]


def milliseconds(result: dict[str, Any], variant: str) -> str:
    taken = [each for each in result["variants"].get(variant, {}).get("seconds", []) if each is not None]
    return f"{1e3 * median(taken):.1f}" if taken else "-"


def operators(result: dict[str, Any], variant: str) -> dict[str, float]:
    """Milliseconds of a step by operator."""
    return {name: ms for name, (_, ms) in result["variants"].get(variant, {}).get("operators", {}).items()}


def is_matrix(operator: str) -> bool:
    name = operator[len("_backward_") :] if operator.startswith("_backward_") else operator
    return name in MATRIX or "interleaved_matmul" in name or name.startswith("_linalg_gemm")


def spoiled(result: dict[str, Any], variant: str) -> bool:
    """Whether something else ran while MXNet's profiler looked: its operators take much longer than the step."""
    taken = [each for each in result["variants"][variant]["seconds"] if each is not None]
    return sum(operators(result, variant).values()) > 1.5 * 1e3 * median(taken)


def bounds(result: dict[str, Any]) -> dict[str, float] | None:
    """What the operators' own times allow.

    ``share``: of matrix operators in FP32's. ``rate``: how much faster those are low, by the rules. ``amdahl``: the
    step, were only they faster. ``best``: were each operator as fast as in the better dtype, and casts free.
    """
    full, low = operators(result, "float32"), operators(result, "rules")
    matrix_full, matrix_low = (sum(ms for name, ms in each.items() if is_matrix(name)) for each in (full, low))
    total = sum(full.values())
    if not matrix_full or not matrix_low or any(spoiled(result, variant) for variant in ("float32", "rules")):
        return None
    share, rate = matrix_full / total, matrix_full / matrix_low
    best = sum(min(ms, low.get(name, ms)) for name, ms in full.items())
    return {"share": share, "rate": rate, "amdahl": 1 / (1 - share + share / rate), "best": total / best}


# -- Tables -----------------------------------------------------------------------------------------


def present(results: list[dict[str, Any]], variants: Any) -> list[str]:
    return [v for v in variants if any(v in result["variants"] for result in results)]


def times(results: dict[str, Any], task: str) -> Iterator[str]:
    rows = of_task(results, task)
    variants = present(rows, [v for v in LABELS if not v.startswith("torch")])
    if not rows:
        return
    yield f"## {task.capitalize()}\n"
    yield f"| network | FP32, ms | {' | '.join(LABELS[v][0] for v in variants)} |\n|---|---|{'---|' * len(variants)}"
    for result in rows:
        cells = [spread(ratios(result, variant)) for variant in variants]
        yield f"| {shape(result)} | {milliseconds(result, 'float32')} | {' | '.join(cells)} |"
    means = [[median(r) for result in rows if (r := ratios(result, variant))] for variant in variants]
    cells = [f"{geometric_mean(m):.2f}, of {len(m)}" if m else "-" for m in means]
    yield f"| geometric mean | | {' | '.join(cells)} |\n"


def emulated(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield "## Emulated float16\n"
    yield "What a CPU takes for float16's numbers, as a multiple of FP32's time.\n"
    yield "| network | | FP32, ms | emulated float16, times as long |\n|---|---|---|---|"
    for result in rows:
        longer = spread([1 / ratio for ratio in ratios(result, "rules")])
        yield f"| {shape(result)} | {result['task']} | {milliseconds(result, 'float32')} | {longer} |"
    yield ""


def tuning(results: dict[str, Any]) -> Iterator[str]:
    every = [(each, each["variants"].get("tuned", {}).get("tuning")) for each in results.values()]
    rows = [(each, found) for each, found in every if found]
    if not rows:
        return
    yield "## What tuning takes, and what it foretells\n"
    yield "Times as fast as FP32: predicted, by the sums of operators' and casts' times; measured by tune, in forwards"
    yield "and backwards of its own; and in the whole steps above, optimizer and loss included.\n"
    yield "| network | | operators | tuning, s | chosen | predicted | measured by tune | whole steps |"
    yield "|---|---|---|---|---|---|---|---|"
    for result, found in rows:
        steps = spread(ratios(result, "tuned"))
        counted = f"{found['operators']} | {found['seconds']:.0f} | {found['chosen']}"
        gains = f"{found['predicted']:.2f} | {found['measured']:.2f}"
        yield f"| {shape(result)} | {result['task']} | {counted} | {gains} | {steps} |"
    off = [abs(found["predicted"] / found["measured"] - 1) for _, found in rows]
    yield f"\nPredicted and measured by tune differ by {100 * median(off):.0f} % in the median.\n"


def memory(results: dict[str, Any]) -> Iterator[str]:
    yield "## Peak memory\n"
    yield "The largest resident set of the process, interpreter and libraries included; variants as parts of FP32's.\n"
    variants = present(list(results.values()), [v for v in LABELS if not v.startswith("torch")])
    yield f"| network | | FP32, MiB | {' | '.join(LABELS[v][0] for v in variants)} |"
    yield f"|---|---|---|{'---|' * len(variants)}"
    for result in results.values():
        peak = {name: found["peak"] for name, found in result["variants"].items() if "peak" in found}
        if "float32" in peak:
            cells = [f"{peak[v] / peak['float32']:.2f}" if v in peak else "-" for v in variants]
            yield f"| {shape(result)} | {result['task']} | {peak['float32'] / 2**20:.0f} | {' | '.join(cells)} |"
    yield ""


def torch(results: dict[str, Any]) -> Iterator[str]:
    rows = [result for result in results.values() if "seconds" in result["variants"].get("torch.float32", {})]
    if not rows:
        return
    yield "## PyTorch on the same machine\n"
    yield "Autocast against PyTorch's own FP32, and both frameworks' FP32: above 1, MXNet takes less time.\n"
    yield "| network | | PyTorch FP32, ms | autocast | PyTorch's FP32 / MXNet's |\n|---|---|---|---|---|"
    for result in rows:
        own = spread(ratios(result, "torch.autocast", "torch.float32"))
        across = spread(ratios(result, "float32", "torch.float32"))
        yield f"| {shape(result)} | {result['task']} | {milliseconds(result, 'torch.float32')} | {own} | {across} |"
    yield ""


def roofline(results: dict[str, Any]) -> Iterator[str]:
    rows = [(result, found) for result in of_task(results, "training") if (found := bounds(result))]
    if not rows:
        return
    yield "## What the operators allow\n"
    yield "By the times of single operators, from MXNet's profiler. Share: of matrix operators and their gradients, in"
    yield "FP32. Gain: how much faster they are in low precision. Amdahl: the step, were nothing else faster. Best:"
    yield "were every operator as fast as in its better dtype, and casts free. Reached: the measured step over Best;"
    yield "above 100 % where mxmp computes an operator by others that are faster (grouped convolutions, ReLU6, SGD's"
    yield "update of large arrays)."
    yield "Networks whose profile is missing or was spoiled by another process are left out.\n"
    yield "| network | share | gain | Amdahl | best | rules | tuned | reached |\n|---|---|---|---|---|---|---|---|"
    for result, found in rows:
        rules, tuned = ([median(r) if (r := ratios(result, v)) else None] for v in ("rules", "tuned"))
        measured = [f"{value[0]:.2f}" if value[0] else "-" for value in (rules, tuned)]
        reached = max(filter(None, [*rules, *tuned]), default=None)
        cells = [f"{100 * found['share']:.0f} %", *(f"{found[key]:.2f}" for key in ("rate", "amdahl", "best"))]
        close = f"{100 * reached / found['best']:.0f} %" if reached else "-"
        yield f"| {shape(result)} | {' | '.join([*cells, *measured, close])} |"
    yield ""


def failures(results: dict[str, Any]) -> Iterator[str]:
    rows = [
        f"| {result['title']} | {result['task']} | {variant} | {found['error'].replace('|', chr(92) + '|')} |"
        for result in results.values()
        for variant, found in result["variants"].items()
        if "error" in found
    ]
    if rows:
        yield "## What does not run\n\n| network | | variant | why |\n|---|---|---|---|"
        yield from rows
        yield ""


# -- The picture ------------------------------------------------------------------------------------


def picture(results: dict[str, Any], path: Path) -> None:
    """FP32's time over each variant's, with quartiles, of training and of inference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    tasks = [task for task in TASKS if of_task(results, task)]
    most = max(len(of_task(results, task)) for task in tasks)
    size = (5.8 * len(tasks) + 1, 1.6 + 0.42 * most)
    figure, axes = pyplot.subplots(1, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for plot, task in zip(axes[0], tasks):
        rows = of_task(results, task)[::-1]
        variants = present(rows, LABELS)
        plot.axvline(1, color="0.6", linewidth=1.2)
        for number, variant in enumerate(variants):
            label, color = LABELS[variant]
            own = "torch.float32" if variant.startswith("torch") else "float32"
            apart = 0.18 * ((len(variants) - 1) / 2 - number)
            found = [(row + apart, r) for row, each in enumerate(rows) if (r := ratios(each, variant, own))]
            middles = [median(r) for _, r in found]
            edges = [quartiles(r) for _, r in found]
            reach = [
                [m - low for m, (low, *_) in zip(middles, edges)],
                [high - m for m, (*_, high) in zip(middles, edges)],
            ]
            text = label.replace("`", "") + (", against its own FP32" if own != "float32" else "")
            heights = [y for y, _ in found]
            plot.errorbar(middles, heights, xerr=reach, fmt="o", color=color, label=text, markersize=5)
        plot.set(xscale="log", yticks=range(len(rows)), xlabel="FP32's time / the variant's: right of 1 is faster")
        plot.set_yticklabels([result["title"] for result in rows])
        plot.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.75, 1, 1.5, 2, 3]))
        plot.xaxis.set_minor_locator(NullLocator())
        plot.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        plot.set_title(task.capitalize(), fontsize=11)
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
