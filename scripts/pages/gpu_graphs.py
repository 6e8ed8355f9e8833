"""The manual's page of GPU graphs from their counts: tables, a model of the time that they mean, and a picture."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator

from support.options import parse
from support.pages import filled, subplots, table
from support.results import DOCS, read
from sweep.gpu_graphs import RESULTS, names

VARIANTS = {  # by name: label and colour (Okabe and Ito's)
    "float16": ("mxmp, `float16`", "#D55E00"),
    "float16-fast": ("mxmp, `float16-fast`", "#0072B2"),
    "minimal": ("mxmp, minimal plan", "#009E73"),
    "contrib.amp": ("`mxnet.contrib.amp`", "#000000"),
}
BANDWIDTH = {"V100": 900e9, "A100": 1555e9}  # bytes a second
LAUNCH = 3.8e-6  # seconds
FULL_SIZE = ("classification", "gluon", "video", "bert", "language model", "translation")
KNOWN = {
    "resnet50_v1b": "ResNet-50",
    "vgg16": "VGG-16",
    "mobilenetv2_1.0": "MobileNetV2",
    "mobilenetv3_large": "MobileNetV3",
    "densenet121": "DenseNet-121",
    "inceptionv3": "Inception v3",
    "resnext50_32x4d": "ResNeXt-50",
    "alexnet": "AlexNet",
    "squeezenet1.0": "SqueezeNet",
    "ssd_300_vgg16_atrous_voc": "SSD-300",
    "bert_12_768_12": "BERT-base",
    "standard_lstm_lm_650": "LSTM language model",
}
Figures = "dict[str, Any]"
COLUMNS: tuple[Callable[[Figures], Any], ...] = (
    lambda f: f["casts"],
    lambda f: f["cast_bytes"] / 2**30,
    lambda f: f["operators"],
    lambda f: f["step"],
    lambda f: 1e3 * cast_seconds(f, "V100"),
    lambda f: 1e3 * cast_seconds(f, "A100"),
    lambda f: 1e3 * launch_seconds(f),
)


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    results = read(RESULTS)
    (DOCS / "gpu-graphs.md").write_text(page(results))
    picture(results, DOCS / "gpu-graphs.png")


def page(results: dict[str, Any]) -> str:
    networks, variants = counted(results), shown(results)
    missing = len(set(names()) - results.keys())
    return filled(
        __file__,
        number=len(networks),
        missing=f"The count is not complete: {missing} of {len(names())} names have no result yet." * bool(missing),
        complete=len(complete(results)),
        summary=table(f"| {' | '.join(variants.values())}", summary(results)),
        known=table(
            "network | | casts | GiB | operators | step | casts, ms: V100 | A100 | launches, ms", known(results)
        ),
        variants=" / ".join(variants.values()),
        kinds="\n\n".join(kinds(networks, variants)),
        failures=table("network | | why", failures(results)),
    )


def counted(results: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in results.items() if "variants" in found}


def shown(results: dict[str, Any]) -> dict[str, str]:
    """Return the variants that have a result, with their labels."""
    present = {variant for found in counted(results).values() for variant in found["variants"]}
    return {variant: label for variant, (label, _) in VARIANTS.items() if variant in present}


def complete(results: dict[str, Any]) -> list[Figures]:
    """Return the networks that have figures of every variant."""
    wanted = ["float32", *shown(results)]
    found = counted(results).values()
    return [each for each in found if all("cast_bytes" in each["variants"].get(variant, {}) for variant in wanted)]


def cast_seconds(figures: Figures, gpu: str) -> float:
    return 2 * figures["cast_bytes"] / BANDWIDTH[gpu]


def launch_seconds(figures: Figures) -> float:
    return (figures["operators"] + figures["step"]) * LAUNCH


def cells(figures: Figures, digits: int, count: int = len(COLUMNS)) -> list[str]:
    """Return the text of the first columns, fractions with so many digits; dashes where there are no figures."""
    values = [None if "error" in figures else column(figures) for column in COLUMNS[:count]]
    return ["-" if v is None else f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in values]


def summary(results: dict[str, Any]) -> Iterator[list[str]]:
    variants, with_all = shown(results), complete(results)
    rows: dict[str, tuple[Callable[[dict, dict], float], str]] = {
        "casts": (lambda v, f: v["casts"], "{:.0f}"),
        "bytes cast, of what the FP32 operators write": (lambda v, f: 100 * v["cast_bytes"] / f["written"], "{:.2g} %"),
        "operators of forward and backward, of FP32's": (
            *(lambda v, f: v["operators"] / f["variants"]["float32"]["operators"], "{:.2f}"),
        ),
        "operators of the step": (lambda v, f: v["step"], "{:.0f}"),
    }
    for label, (figure, form) in rows.items():
        yield [label, *(form.format(median(figure(f["variants"][v], f) for f in with_all)) for v in variants)]
    cast = {v: [f["variants"][v]["cast_bytes"] for f in with_all] for v in variants}
    fewer = {v: sum(ours <= amp for ours, amp in zip(each, cast["contrib.amp"])) for v, each in cast.items()}
    cells = [f"{number} of {len(with_all)}" if v != "contrib.amp" else "" for v, number in fewer.items()]
    yield ["casts no more bytes than `mxnet.contrib.amp`", *cells]


def known(results: dict[str, Any]) -> Iterator[list[str]]:
    variants = {"float32": "FP32", **shown(results)}
    for name in filter(counted(results).get, KNOWN):
        for variant, label in variants.items():
            figures = results[name]["variants"].get(variant, {"error": "not counted"})
            title = f"**{KNOWN[name]}**, `{name}`" if variant == "float32" else ""
            yield [title, label, *(["- | | | | | | "] if "error" in figures else cells(figures, 3))]


def kinds(networks: dict[str, Any], variants: dict[str, str]) -> Iterator[str]:
    for kind in dict.fromkeys(found["kind"] for found in networks.values()):
        rows = []
        for name in sorted(name for name, found in networks.items() if found["kind"] == kind):
            found = networks[name]
            each = [cells(found["variants"].get(variant, {"error": "not counted"}), 2, 6) for variant in variants]
            shape = " x ".join(map(str, max(found["inputs"].values(), key=len, default=[])))
            rows.append([f"`{name}`", shape, f"{found['written'] / 2**30:.2g}", *map(" / ".join, zip(*each))])
        head = "network | inputs | written | casts | GiB cast | operators | step | ms on a V100 | ms on an A100"
        yield f"### {kind}\n\n{table(head, rows)}"


def failures(results: dict[str, Any]) -> Iterator[list[str]]:
    for name, found in results.items():
        reasons = {"": found.get("left_out") or found.get("error")}
        reasons.update({VARIANTS[v][0]: f.get("error") for v, f in found.get("variants", {}).items() if v in VARIANTS})
        for label, reason in reasons.items():
            if reason:
                plain = re.sub(r"\[\d\d:\d\d:\d\d\] ", "", reason).replace("|", "\\|").replace("`", "'")
                yield [f"`{name}`", label, plain[:200]]


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw well-known networks by name, and the share of what is written that each network casts, sorted."""
    networks, variants = counted(results), shown(results)
    names = [name for name in KNOWN if name in networks][::-1]
    figure, (left, right) = subplots(1, 2, figsize=(12, 5.6), layout="constrained", width_ratios=[1.25, 1])
    for row, name in enumerate(names):
        left.plot(networks[name]["written"] / 2**30, row, "|", color="0.6", markersize=16, markeredgewidth=2.5)
    real = [found for found in complete(results) if found["kind"] in FULL_SIZE]
    for number, (variant, label) in enumerate(variants.items()):
        color = VARIANTS[variant][1]
        text = label.replace("`", "")
        apart = 0.2 * ((len(variants) - 1) / 2 - number)
        points = [(row + apart, networks[n]["variants"].get(variant, {})) for row, n in enumerate(names)]
        points = [(f["cast_bytes"] / 2**30, row) for row, f in points if f.get("cast_bytes")]
        left.plot(*zip(*points), "o", color=color, label=text, markersize=6)
        shares = sorted(100 * f["variants"][variant]["cast_bytes"] / f["written"] for f in real)
        right.plot([100 * (i + 0.5) / len(shares) for i in range(len(shares))], shares, color=color, linewidth=2.2)
    left.plot([], [], "|", color="0.6", markersize=12, markeredgewidth=2.5, label="written by all operators, FP32")
    left.set(xscale="log", xlabel="GiB read and written by casts in one forward", yticks=range(len(names)))
    left.set_yticklabels([KNOWN[name] for name in names])
    left.set_title("Well-known networks at a training batch", fontsize=11)
    left.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside lower center", ncols=5)
    right.set(yscale="log", xlim=(0, 100), xlabel="per cent of the networks")
    right.set_ylabel("bytes cast, per cent of what operators write")
    right.set_title(f"{len(real)} networks at a training batch, each curve sorted", fontsize=11)
    right.grid(alpha=0.3)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
