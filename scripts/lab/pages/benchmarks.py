"""The manual's page of benchmarks from what ``bench models`` measured: tables, a picture, and a roofline."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Dict, Iterable, Iterator

from bench.models import RESULTS, TASKS
from bench.turns import milliseconds, quartiles, spread
from support.options import parse
from support.pages import filled, subplots, table
from support.results import read

LABELS = {  # by variant: in words, and a colour (Okabe and Ito's)
    "rules": ("mxmp, rules", "#0072B2"),
    "tuned": ("mxmp, tuned", "#009E73"),
    "contrib.amp": ("`mxnet.contrib.amp`", "#000000"),
}
MATRIX = ("Convolution", "Deconvolution", "FullyConnected", "RNN", "dot", "batch_dot")
Result = Dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    results = read(RESULTS)
    RESULTS.with_suffix(".md").write_text(page(results))
    shown = {key: r for key, r in results.items() if r["dtype"] == "bfloat16" and r["threads"] == 1}
    picture(shown, RESULTS.with_suffix(".png"))


def page(results: dict[str, Any]) -> str:
    everything = list(results.values())
    found = [each for each in everything if each["dtype"] == "bfloat16" and each["threads"] == 1]
    parallel = [each for each in everything if each["dtype"] == "bfloat16" and each["threads"] == 2]
    machines = sorted({(r["cpu"], r["threads"], r["dtype"]) for r in found})
    emulated = [
        [shape(r), r["task"], ms(r, "float32"), spread([1 / ratio for ratio in ratios(r, "rules")])]
        for r in everything
        if r["dtype"] == "float16"
    ]
    plans = [(r, plan) for r in found if (plan := r["variants"].get("tuned", {}).get("tuning"))]
    off = [abs(plan["predicted"] / plan["measured"] - 1) for _, plan in plans]
    failures = [
        [result["title"], result["task"], variant, figures["error"].replace("|", "\\|")]
        for result in found
        for variant, figures in result["variants"].items()
        if "error" in figures
    ]
    tuned = "network | | operators | tuning, s | chosen | predicted | measured by tune | whole steps"
    allowed = "network | share | gain | Amdahl | best | rules | tuned | reached"
    return filled(
        __file__,
        **{task: times(of_task(found, task)) for task in TASKS},
        parallel=times(of_task(parallel, TASKS[0])) if parallel else "",
        emulated=some("network | | FP32, ms | emulated float16, times as long", emulated),
        tuning=some(tuned, map(tuning, plans)),
        roofline=some(allowed, map(roofline, filter(bounds, of_task(found, TASKS[0])))),
        failures=some("network | | variant | why", failures),
        off=f"{100 * median(off):.0f}" if off else "",
        memory=memory(found),
        machines="\n".join(f"- {cpu}, {n} OpenMP thread{'s' * (n > 1)}, {dtype}" for cpu, n, dtype in machines),
    )


def some(head: str, rows: Iterable[Any]) -> str:
    """Return a table; empty where it has no rows."""
    return table(head, found) if (found := list(rows)) else ""


def of_task(results: list[Result], task: str) -> list[Result]:
    return [result for result in results if result["task"] == task]


def shape(result: Result) -> str:
    return f"**{result['title']}**, {result['batch']} of {result['size']}"


def seconds(result: Result, variant: str) -> list[float | None]:
    return result["variants"].get(variant, {}).get("seconds", [])


def ratios(result: Result, variant: str) -> list[float]:
    """Return FP32's time over the variant's, by round; none where one has no figures."""
    both = zip(seconds(result, "float32"), seconds(result, variant))
    return [a / b for a, b in both if a is not None and b is not None]


def ms(result: Result, variant: str) -> str:
    return f"{milliseconds(taken):.1f}" if any(taken := seconds(result, variant)) else "-"


def operators(result: Result, variant: str) -> dict[str, float]:
    """Return milliseconds of a step by operator."""
    return {name: ms for name, (_, ms) in result["variants"].get(variant, {}).get("operators", {}).items()}


def is_matrix(operator: str) -> bool:
    name = operator[len("_backward_") :] if operator.startswith("_backward_") else operator
    return name in MATRIX or "interleaved_matmul" in name or name.startswith("_linalg_gemm")


def spoiled(result: Result, variant: str) -> bool:
    """Return whether other processes ran while MXNet's profiler did: operators take much longer than the step."""
    return sum(operators(result, variant).values()) > 1.5 * milliseconds(seconds(result, variant))


def bounds(result: Result) -> dict[str, float] | None:
    """Return what the operators' own times allow.

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


def present(results: list[Result]) -> list[str]:
    return [v for v in LABELS if any(v in result["variants"] for result in results)]


def labels(variants: list[str]) -> str:
    return " | ".join(LABELS[variant][0] for variant in variants)


def times(results: list[Result]) -> str:
    variants = present(results)
    rows = [[shape(r), ms(r, "float32"), *(spread(ratios(r, v)) for v in variants)] for r in results]
    shared = [r for r in results if all(ratios(r, variant) for variant in variants)]
    rows.append([f"geometric mean | | {' | '.join(means(results, variants))}"])
    if 0 < len(shared) < len(results):
        rows.append([f"of the networks that have all figures | | {' | '.join(means(shared, variants))}"])
    return table(f"network | FP32, ms | {labels(variants)}", rows) if results else ""


def means(results: list[Result], variants: list[str]) -> list[str]:
    """Return the geometric mean of each variant's medians, with the number of networks, as text."""
    found = [[median(r) for result in results if (r := ratios(result, variant))] for variant in variants]
    return [f"{geometric_mean(m):.2f}, of {len(m)}" if m else "-" for m in found]


def tuning(plan: tuple[Result, dict[str, Any]]) -> list[Any]:
    result, found = plan
    gains = [f"{found['predicted']:.2f}", f"{found['measured']:.2f}", spread(ratios(result, "tuned"))]
    return [shape(result), result["task"], found["operators"], f"{found['seconds']:.0f}", found["chosen"], *gains]


def memory(results: list[Result]) -> str:
    variants, rows = present(results), []
    for result in results:
        peak = {name: found["peak"] for name, found in result["variants"].items() if "peak" in found}
        if "float32" in peak:
            cells = [f"{peak[v] / peak['float32']:.2f}" if v in peak else "-" for v in variants]
            rows.append([shape(result), result["task"], f"{peak['float32'] / 2**20:.0f}", *cells])
    return table(f"network | | FP32, MiB | {labels(variants)}", rows)


def roofline(result: Result) -> Iterator[str]:
    found = bounds(result) or {}
    measured = [median(r) if (r := ratios(result, variant)) else None for variant in ("rules", "tuned")]
    reached = max(filter(None, measured), default=None)
    yield from (shape(result), f"{100 * found['share']:.0f} %")
    yield from (f"{found[key]:.2f}" for key in ("rate", "amdahl", "best"))
    yield from (f"{value:.2f}" if value else "-" for value in measured)
    yield f"{100 * reached / found['best']:.0f} %" if reached else "-"


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw FP32's time over each variant's, with quartiles, of training and of inference."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    tasks = {task: rows for task in TASKS if (rows := of_task(list(results.values()), task)[::-1])}
    size = (5.8 * len(tasks) + 1, 1.6 + 0.42 * max(map(len, tasks.values())))
    figure, axes = subplots(1, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for plot, (task, rows) in zip(axes[0], tasks.items()):
        variants = present(rows)
        plot.axvline(1, color="0.6", linewidth=1.2)
        for number, variant in enumerate(variants):
            label, color = LABELS[variant]
            apart = 0.18 * ((len(variants) - 1) / 2 - number)
            found = [(row + apart, r) for row, each in enumerate(rows) if (r := ratios(each, variant))]
            for row, each in enumerate(rows):
                if "error" in each["variants"].get(variant, {}):
                    note = f"{label.replace('`', '')}: fails"
                    text = plot.text(0.97, row + apart, note, color=color, fontsize=8, va="center", ha="right")
                    text.set_in_layout(False)
            if not found:
                continue
            lows, middles, highs = zip(*(quartiles(r) for _, r in found))
            reach = [[m - low for m, low in zip(middles, lows)], [high - m for m, high in zip(middles, highs)]]
            style = {"fmt": "o", "color": color, "label": label.replace("`", ""), "markersize": 5}
            plot.errorbar(middles, [y for y, _ in found], xerr=reach, **style)
        plot.set(xscale="log", yticks=range(len(rows)), xlabel="times as fast as FP32 (right of 1 is faster)")
        plot.set_yticklabels([f"{result['title']}, batch {result['batch']}" for result in rows])
        plot.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.75, 1, 1.5, 2, 3]))
        plot.xaxis.set_minor_locator(NullLocator())
        plot.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        plot.set_title(task.capitalize(), fontsize=11)
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
    cpus, threads = ({result[key] for result in results.values()} for key in ("cpu", "threads"))
    figure.suptitle(
        f"bfloat16 against FP32 on a CPU ({', '.join(sorted(cpus))}), {' or '.join(map(str, sorted(threads)))} thread\n"
        "whole steps; dot: median of the rounds, bar: quartiles",
        fontsize=12,
    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
