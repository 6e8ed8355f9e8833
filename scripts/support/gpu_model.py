"""A model of the time that a GPU needs for a training step, and what others have measured of the same kind.

A step takes the sum over all its launches and calls of the longer of computing and moving bytes, and a latency each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Iterable, NamedTuple

from mxmp.diagnose.advising.gpus import GPUS, Gpu
from support.results import FOLDER

RECORDS = FOLDER / "gpu-times.json"  # the work of steps: "sweep gpu-times"
LATENCY = 5e-6  # seconds of a launch or call, assumed
# Measured on a V100 (SXM2, 16 GB) by clpeak with loads of 4 bytes: 767.48 GB/s of 900 (its README, see SOURCES).
BANDWIDTH = 767.48 / 900
TIMED, PART = "timed: ", "part: "  # records of what the acceptance run times begin so
SIZES = {"resnet50": (64, 224), "ssd300": (16, 300), "bert": (16, 128)}  # of its networks: batch, and pixels or tokens
VARIANTS = ["float32", "contrib.amp", "float16", "float16-fast"]
MODELLED = {
    **GPUS,
    # NVIDIA A100 80 GB datasheet (1758950-r4): the same chip, with faster memory
    "a100-80": replace(GPUS["a100"], name="A100 (SXM4, 80 GB)", bandwidth=2039e9),
}


@dataclass(frozen=True)
class Reached:
    """The shares of the data sheet's peaks that kernels reach, and the seconds that each takes in any case."""

    bandwidth: float = BANDWIDTH
    float32: float = 1.0
    tensor: float = 1.0  # of Tensor Cores, in float16 and TF32
    latency: float = LATENCY


class Published(NamedTuple):
    """Somebody's measurement of one GPU: how many pictures or sentences it trains on in a second."""

    title: str
    network: str
    batch: int
    gpu: str
    variant: str
    rate: float
    source: str
    channels_last: bool = False


_RESNET = ("ResNet-50 v1.5", "resnet50_v1b")
_BERT = ("BERT-base, 128 tokens", "bert_base")
_DLPERF = "https://github.com/Oneflow-Inc/DLPerf/blob"
_NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/blob"
SOURCES = {
    "DLPerf, ResNet-50": f"{_DLPERF}/a17cae58bd7715898b3732caf7129203a4a62c7a/MxNet/Classification/RN50v1b/README.md",
    "DLPerf, BERT": f"{_DLPERF}/035a6c6987843d6c81c7ca04d2acfad6f02b4914/MxNet/BERT/README.md",
    "NVIDIA": f"{_NVIDIA}/134510b4b7ff6225a76805b809e414fec3163071/MxNet/Classification/RN50v1.5/README.md",
    "MXNet": "https://mxnet.apache.org/api/faq/perf",
    "clpeak": "https://github.com/jjkeijser/clpeak",
}
PUBLISHED = [
    Published(*_RESNET, 128, "v100", "float32", 384.19, "DLPerf, ResNet-50"),
    Published(*_RESNET, 256, "v100", "float16-fast", 833.65, "DLPerf, ResNet-50"),
    *(Published(*_RESNET, n, "v100", "float32", rate, "NVIDIA") for n, rate in ((96, 384), (128, 417))),
    *(Published(*_RESNET, n, "v100", "float16-fast", rate, "NVIDIA", True) for n, rate in ((192, 1376), (256, 1492))),
    Published(*_RESNET, 256, "a100-80", "float32", 1022, "NVIDIA"),
    Published(*_RESNET, 256, "a100-80", "float16-fast", 2180, "NVIDIA", True),
    *(
        Published(*_BERT, n, "v100", "float32", r, "DLPerf, BERT")
        for n, r in ((32, 150.11), (48, 153.75), (64, 156.76))
    ),
    *(
        Published(*_BERT, n, "v100", "float16-fast, safe sums", rate, "DLPerf, BERT")
        for n, rate in ((64, 473.76), (96, 516.54), (128, 544.31))
    ),
    *(
        Published("ResNet-50 v2", "resnet50_v2", n, "v100", "float32", rate, "MXNet")
        for n, rate in ((32, 298.51), (64, 343.19), (128, 363.69))
    ),
    *(
        Published("Inception v3", "inceptionv3", n, "v100", "float32", rate, "MXNet")
        for n, rate in ((32, 214.48), (64, 247.43), (128, 253.68))
    ),
]
# Each of the two unknown shares is fitted on one figure; all others are predicted.
FITTED = {"float32": PUBLISHED[0], "tensor": next(p for p in PUBLISHED if p.network == "bert_base" and p.batch == 96)}


def seconds(work: Iterable[list], gpu: Gpu, reached: Reached, *, channels_last: bool = False) -> float:
    """Return a step's seconds by the model; ``work``: kind, FLOPs, bytes and number of each, as gpu.null.work has."""
    total = 0.0
    for kind, flops, moved, number in work:
        if kind == "layout" and channels_last:
            continue
        on_tensor_cores = kind in gpu.tensor
        peak = gpu.peak(kind) * (reached.tensor if on_tensor_cores else reached.float32)
        total += number * (reached.latency + max(flops / peak, moved / (gpu.bandwidth * reached.bandwidth)))
    return total


def key(published: Published) -> str:
    return f"{published.network}, {published.batch}"


def modelled(published: Published, records: dict[str, Any], reached: Reached) -> float:
    """Return the modelled seconds of a published step."""
    work = records[key(published)][published.variant]
    return seconds(work, MODELLED[published.gpu], reached, channels_last=published.channels_last)


def fit(records: dict[str, Any], latency: float = LATENCY) -> Reached:
    """Return the shares with which the model gives the figures of ``FITTED``, one after the other."""
    reached = Reached(latency=latency)
    for name, published in FITTED.items():
        low, high = 0.01, 4.0
        for _ in range(60):
            middle = (low * high) ** 0.5
            found = modelled(published, records, replace(reached, **{name: middle}))
            low, high = (middle, high) if found > published.batch / published.rate else (low, middle)
        reached = replace(reached, **{name: low})
    return reached


def times(work: Iterable[list], reached: Reached) -> dict[str, float]:
    """Return a step's modelled seconds on a V100 and on an A100, to four digits."""
    return {gpu: float(f"{seconds(work, GPUS[gpu], reached):.4g}") for gpu in ("v100", "a100")}


def summary(records: dict[str, Any]) -> dict[str, Any]:
    """Return what the model says: the shares, and each published figure beside it.

    ``bound``: the largest share of a record's bytes that is an upper bound, for kernels that no rule knows. ``median
    by latency``: of the modelled times over the published ones, fitted with another latency.
    """
    reached = fit(records)
    published = [
        {
            **{name: value for name, value in each._asdict().items() if name not in ("rate", "gpu")},
            "gpu": MODELLED[each.gpu].name,
            "published": each.rate,
            "modelled": round(each.batch / modelled(each, records, reached), 2),
            "of published": round(modelled(each, records, reached) * each.rate / each.batch, 4),
            "fitted": each in FITTED.values(),
        }
        for each in PUBLISHED
    ]
    works = [work for variants in records.values() for work in variants.values() if isinstance(work, list)]
    shares = {name: round(getattr(reached, name), 4) for name in ("bandwidth", "float32", "tensor")}
    medians = {f"{1e6 * each:.0f} µs": round(median(errors(records, each)), 4) for each in (0.0, 2 * LATENCY)}
    return {
        "reached": shares,
        "bound": round(max(map(bound, works)), 4),
        "median by latency": medians,
        "published": published,
    }


def errors(records: dict[str, Any], latency: float) -> list[float]:
    """Return the modelled times over the published ones that nothing is fitted on."""
    reached = fit(records, latency)
    predicted = [each for each in PUBLISHED if each not in FITTED.values()]
    return [modelled(each, records, reached) * each.rate / each.batch for each in predicted]


def bound(work: Iterable[list]) -> float:
    """Return the share of the bytes that is an upper bound."""
    moved = [(kind == "bound", moved * number) for kind, _, moved, number in work]
    return sum(each for is_bound, each in moved if is_bound) / sum(each for _, each in moved)
