"""Write the manual's page of GPU graphs from their records: tables, a model of the time, and a picture."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterable, Iterator

from support import gpu_model
from support.options import parse
from support.pages import filled, subplots, table
from support.results import DOCS, FOLDER, read, write
from sweep.gpu_graphs import OURS, RESULTS, SAFE_SUMS, VARIANTS, names

KNOWN = {
    "resnet50_v1b": "ResNet-50",
    "vgg16": "VGG-16",
    "mobilenetv2_1.0": "MobileNetV2",
    "mobilenetv3_large": "MobileNetV3",
    "densenet121": "DenseNet-121",
    "inceptionv3": "Inception v3",
    "resnext50_32x4d": "ResNeXt-50",
    "se_resnet50_v1": "SE-ResNet-50",
    "alexnet": "AlexNet",
    "squeezenet1.0": "SqueezeNet",
    "ssd_300_vgg16_atrous_voc": "SSD-300",
    "bert_12_768_12": "BERT-base",
    "standard_lstm_lm_650": "LSTM language model",
}
LABELS = {  # label and colour (Okabe and Ito's)
    "float32": ("FP32", "#999999"),
    "contrib.amp": ("`mxnet.contrib.amp`", "#000000"),
    "float16": ("mxmp, `float16`", "#D55E00"),
    "float16-fast": ("mxmp, `float16-fast`", "#0072B2"),
    SAFE_SUMS: ("mxmp, `float16-fast`, safe sums", "#009E73"),
}
# As sorted curves: those of float16-fast would lie on that of float16, but for some networks.
_DRAWN = ("contrib.amp", "float16")
HEAD = "modelled ms, V100 | modelled ms, A100 | peak, GB | launches | step | GB cast"
PUBLISHED = (
    "network | batch | GPU | precision | published, a second | modelled, a second | modelled time, of the published"
)
GPUS = {"v100": "V100", "a100": "A100"}
TENSOR_CORES = "f16, sums f32, TENSOR_OP"
Figures = Dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    results, model = read(RESULTS), gpu_model.summary(read(gpu_model.RECORDS))
    write(FOLDER / "gpu-model.json", model)
    (DOCS / "gpu-graphs.md").write_text(page(results, model), encoding="utf-8")
    picture(results, DOCS / "gpu-graphs.png")
    picture_of_times(results, DOCS / "gpu-times.png")


def page(results: dict[str, Any], model: dict[str, Any]) -> str:
    networks = recorded(results)
    lacking = len(set(names()) - results.keys())
    labels = [label for label, _ in LABELS.values()]
    return filled(
        __file__,
        number=len(networks),
        missing=f"The record is not complete: {lacking} of {len(names())} names have no result yet." * bool(lacking),
        complete=len(complete(networks)),
        summary=table(f"| {' | '.join(labels)}", summary(networks)),
        times=table(f"GPU | | {' | '.join(labels[1:])}", times(networks)),
        as_one_trains=len(complete(as_one_trains(networks))),
        known=table(f"network | | {HEAD} | library calls | on Tensor Cores | casts", known(networks)),
        **model_parts(model),
        variants=" / ".join(labels),
        kinds="\n\n".join(kinds(networks)),
        failures=table("network | | why", failures(results)),
    )


def recorded(results: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in results.items() if "variants" in found}


def complete(networks: dict[str, Any]) -> list[Figures]:
    """Return the variants' figures of each network that has figures of all."""
    found = [each["variants"] for each in networks.values()]
    return [each for each in found if all("launches" in each.get(variant, {}) for variant in VARIANTS)]


def as_one_trains(networks: dict[str, Any]) -> dict[str, Any]:
    """Return the networks whose batch is one that people train with."""
    return {name: found for name, found in networks.items() if found["batch"] != "small"}


def speedups(networks: dict[str, Any], variant: str, gpu: str) -> list[float]:
    """Return FP32's modelled time over the variant's, the least first, of networks at a batch as one trains with."""
    found = complete(as_one_trains(networks))
    return sorted(each["float32"]["seconds"][gpu] / each[variant]["seconds"][gpu] for each in found)


def times(networks: dict[str, Any]) -> Iterator[list[str]]:
    for gpu, title in GPUS.items():
        found = {variant: speedups(networks, variant, gpu) for variant in VARIANTS[1:]}
        middle = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in found.values()]
        yield [title, "FP32's time over the variant's: median, range", *middle]
        yield ["", "faster than FP32", *(f"{sum(one > 1 for one in each)} of {len(each)}" for each in found.values())]
        seconds = [
            {name: one["seconds"][gpu] for name, one in each.items()} for each in complete(as_one_trains(networks))
        ]
        faster = [sum(each[variant] < each["contrib.amp"] for each in seconds) for variant in OURS]
        yield ["", "faster than `mxnet.contrib.amp`", "", *(f"{count} of {len(seconds)}" for count in faster)]


def model_parts(model: dict[str, Any]) -> dict[str, str]:
    """Return what the page says of the model: its shares of the peaks, and its errors on published figures."""
    reached = {f"{name}_share": f"{100 * share:.0f} %" for name, share in model["reached"].items()}
    errors = sorted(each["of published"] for each in model["published"] if not each["fitted"])
    close = [each for each in errors if 0.85 <= each <= 1.15]
    return {
        **reached,
        "by_latency": " or ".join(f"{each:.2f} with {of}" for of, each in model["median by latency"].items()),
        "latency": f"{1e6 * gpu_model.LATENCY:.0f}",
        "published": table(PUBLISHED + " | source", map(published_cells, model["published"])),
        "predicted": str(len(errors)),
        "close": str(len(close)),
        "least": f"{errors[0]:.2f}" if errors else "",
        "most": f"{errors[-1]:.2f}" if errors else "",
        "middle": f"{median(errors):.2f}" if errors else "",
        "bound_share": f"{100 * model['bound']:.1f} %",
        "sources": "\n".join(f"[{name}]: {url}" for name, url in gpu_model.SOURCES.items()),
    }


def published_cells(each: dict[str, Any]) -> list[str]:
    precision = "FP32" if each["variant"] == "float32" else "mixed, NHWC" if each["channels_last"] else "mixed"
    if precision == "FP32" and each["gpu"].startswith("A100"):
        precision = "TF32"
    ratio = f"{each['of published']:.2f}" + ", fitted" * each["fitted"]
    rates = [f"{each[rate]:.0f}" for rate in ("published", "modelled")]
    return [each["title"], str(each["batch"]), each["gpu"], precision, *rates, ratio, f"[{each['source']}]"]


def tensor_core_share(figures: Figures) -> float:
    """Return the share of the matrix calls that may run on Tensor Cores."""
    calls = figures["matrix_calls"]
    return calls.get(TENSOR_CORES, 0) / max(1, sum(calls.values()))


def number(value: float) -> str:
    """Return a number with at least two digits and no exponent."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 0.001 else "0"


def cells(figures: Figures) -> list[str]:
    """Return what both tables have of one variant."""
    if "error" in figures:
        return ["-"] * 6
    return [
        *(number(1e3 * figures["seconds"][gpu]) for gpu in GPUS),
        number(figures["peak_bytes"] / 1e9),
        str(figures["launches"]),
        str(figures["step_launches"]),
        number(figures["bytes_cast"] / 1e9),
    ]


def summary(networks: dict[str, Any]) -> Iterator[list[str]]:
    found = complete(networks)
    rows: dict[str, tuple[Callable[[Figures, Figures], float], str]] = {
        "peak memory, of FP32's": (lambda f, fp32: f["peak_bytes"] / fp32["peak_bytes"], "{:.2f}"),
        "launches of forward and backward, of FP32's": (lambda f, fp32: f["launches"] / fp32["launches"], "{:.2f}"),
        "launches of the step, more than FP32's": (
            lambda f, fp32: f["step_launches"] - fp32["step_launches"],
            "{:.0f}",
        ),
        "GB cast": (lambda f, fp32: f["bytes_cast"] / 1e9, "{:.2g}"),
        "matrix calls on Tensor Cores": (lambda f, fp32: 100 * tensor_core_share(f), "{:.0f} %"),
    }
    for label, (figure, form) in rows.items():
        yield [label, *(form.format(median(figure(f[v], f["float32"]) for f in found)) for v in VARIANTS)]
    counts: dict[str, Callable[[Figures, Figures, Figures], bool]] = {
        "no more memory than FP32": lambda f, fp32, _: f["peak_bytes"] <= fp32["peak_bytes"],
        "no more memory than `mxnet.contrib.amp`": lambda f, _, amp: f["peak_bytes"] <= amp["peak_bytes"],
        "no more bytes cast than `mxnet.contrib.amp`": lambda f, _, amp: f["bytes_cast"] <= amp["bytes_cast"],
        "at most 1.1 of FP32's launches and 12": lambda f, fp32, _: f["launches"] <= 1.1 * fp32["launches"] + 12,
        "at most 15 launches in the step more than FP32": (
            lambda f, fp32, _: f["step_launches"] <= fp32["step_launches"] + 15
        ),
    }
    for label, holds in counts.items():
        numbers = [sum(holds(f[variant], f["float32"], f["contrib.amp"]) for f in found) for variant in VARIANTS[1:]]
        yield [label, "", *(f"{count} of {len(found)}" for count in numbers)]


def known(networks: dict[str, Any]) -> Iterator[list[str]]:
    for name in filter(networks.get, KNOWN):
        for variant in VARIANTS:
            figures = networks[name]["variants"].get(variant, {"error": "not recorded"})
            title = f"**{KNOWN[name]}**, `{name}`" if variant == VARIANTS[0] else ""
            calls = ["-"] * 3
            if "error" not in figures:
                share = f"{100 * tensor_core_share(figures):.0f} %"
                calls = [str(figures["library_calls"]), share, str(figures["casts"])]
            yield [title, LABELS[variant][0], *cells(figures), *calls]


def kinds(networks: dict[str, Any]) -> Iterator[str]:
    for kind in dict.fromkeys(found["kind"] for found in networks.values()):
        rows = []
        for name in sorted(name for name, found in networks.items() if found["kind"] == kind):
            found = networks[name]
            each = [cells(found["variants"].get(variant, {"error": "not recorded"})) for variant in VARIANTS]
            shape = " x ".join(map(str, max(found["inputs"], key=len, default=[])))
            rows.append([f"`{name}`", shape, *map(" / ".join, zip(*each))])
        yield f"### {kind}\n\n{table(f'network | inputs | {HEAD}', rows)}"


def failures(results: dict[str, Any]) -> Iterator[list[str]]:
    for name, found in results.items():
        reasons = {"": found.get("left_out") or found.get("error")}
        reasons.update({LABELS[v][0]: f.get("error") for v, f in found.get("variants", {}).items()})
        for label, reason in reasons.items():
            if reason:
                plain = re.sub(r"\[\d\d:\d\d:\d\d\] ", "", reason).replace("|", "\\|").replace("`", "'")
                yield [f"`{name}`", label, plain[:200]]


def size(found: dict[str, Any]) -> str:
    """Return the batch of a record with the size of its pictures, or of its tokens."""
    shape = max(found["inputs"], key=len)
    return f"{shape[0]} of {shape[-1]}²" if len(shape) == 4 else f"{shape[0]} x {shape[1]} tokens"


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw peak memory of well-known networks, and what share of FP32's memory each network needs, sorted."""
    networks = recorded(results)
    shown = [name for name in KNOWN if name in networks][::-1]
    figure, (left, right) = subplots(1, 2, figsize=(12.5, 6.4), layout="constrained", width_ratios=[1.25, 1])
    height = 0.8 / len(VARIANTS)
    for place, variant in enumerate(VARIANTS):
        label, color = LABELS[variant]
        peaks = [networks[name]["variants"].get(variant, {}).get("peak_bytes", 0) / 1e9 for name in shown]
        rows = [row + height * ((len(VARIANTS) - 1) / 2 - place) for row in range(len(shown))]
        left.barh(rows, peaks, height=height, color=color, label=label.replace("`", ""))
    left.set(xlabel="peak memory, GB", yticks=range(len(shown)))
    left.set_yticklabels([f"{KNOWN[name]}, {size(networks[name])}" for name in shown])
    left.set_title("Well-known networks, with their batch", fontsize=11)
    left.grid(alpha=0.3, axis="x")
    large = complete(as_one_trains(networks))
    for variant in _DRAWN:
        shares = sorted(each[variant]["peak_bytes"] / each["float32"]["peak_bytes"] for each in large)
        line(right, variant, shares)
    right.axhline(1, color=LABELS["float32"][1], linewidth=2.2)
    right.set(xlim=(0, 100), ylim=(0, None), xlabel="% of the networks that need at most this much")
    right.set_ylabel("peak memory, as a fraction of FP32's (less is better)")
    right.set_title(f"{len(large)} networks, each at a batch that people train with", fontsize=11)
    right.grid(alpha=0.3)
    figure.suptitle(
        "Memory that MXNet asked a GPU for in one training step: recorded on stubs of CUDA and cuDNN, no GPU ran\n"
        "(safe sums: with MXNET_SAFE_ACCUMULATION=1)",
        fontsize=12,
    )
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5)
    save(figure, (left, right), path)


def picture_of_times(results: dict[str, Any], path: Path) -> None:
    """Draw how many times as fast as FP32 each network is by the model, sorted, on either GPU."""
    networks = recorded(results)
    figure, axes = subplots(1, len(GPUS), figsize=(12.5, 5), layout="constrained", sharey=True)
    for each, (gpu, title) in zip(axes, GPUS.items()):
        for variant in _DRAWN:
            line(each, variant, speedups(networks, variant, gpu))
        each.axhline(1, color=LABELS["float32"][1], linewidth=2.2)
        each.set(xlim=(0, 100), ylim=(0, None), xlabel="% of the networks that are at most this fast")
        each.set_title(title, fontsize=11)
        each.grid(alpha=0.3)
    axes[0].set_ylabel("modelled speed of a training step, FP32 is 1")
    count = len(complete(as_one_trains(networks)))
    figure.suptitle(f"A model of the time of {count} networks, each at a batch that people train with: no GPU ran")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    save(figure, axes, path)


def line(axes: Any, variant: str, values: list[float]) -> None:
    """Draw sorted ``values``, one for each network."""
    label, color = LABELS[variant]
    percent = [100 * (i + 0.5) / len(values) for i in range(len(values))]
    axes.plot(percent, values, color=color, label=label.replace("`", ""), linewidth=2)


def save(figure: Any, panels: Iterable[Any], path: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
