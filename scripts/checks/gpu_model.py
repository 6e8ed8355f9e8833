"""Hold what the acceptance run has measured on a GPU against the model of its time.

    python scripts/dev.py check gpu-model gpu-acceptance.json

The model is that of docs/gpu-graphs.md: its shares of the peaks are fitted on published figures, not on this file. With
``--gpu`` the model is of another GPU than the file names.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Iterator

from bench.turns import milliseconds
from support import gpu_model
from support.options import parse
from support.pages import show
from support.results import ROOT, read


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "file"),
        file=(ROOT / "gpu-acceptance.json", "what scripts/gpu_acceptance.sh wrote"),
        gpu=(str, "default: what the file names", tuple(gpu_model.MODELLED)),
    )
    found = read(args.file)
    if not found:
        raise SystemExit(f"error: {args.file} holds no results; bash scripts/gpu_acceptance.sh writes it on a GPU")
    gpu = args.gpu or named(found["machine"].get("device", ""), found["machine"].get("memory", ""))
    rows = list(compared(found, read(gpu_model.RECORDS), gpu))
    print(f"{found['machine'].get('device', 'a GPU')}, modelled as {gpu_model.MODELLED[gpu].name}")
    show("timed | variant | measured ms | modelled ms | modelled time, of the measured", map(cells, rows))
    ratios = [modelled / taken for *_, taken, modelled in rows if taken and modelled]
    if ratios:
        print(f"median of {len(ratios)}: {median(ratios):.2f}")


def named(device: str, memory: str) -> str:
    """Return the name of the GPU that nvidia-smi names, as "Tesla V100-SXM2-16GB" with "16160 MiB"."""
    for name in ("v100", "t4", "a100"):
        if name in device.lower():
            return "a100-80" if name == "a100" and int(memory.split()[0]) > 41_000 else name
    raise SystemExit(f"error: there is no model of {device!r}; --gpu names one of {', '.join(gpu_model.MODELLED)}")


def compared(found: dict[str, Any], records: dict[str, Any], gpu: str) -> Iterator[tuple[str, str, float, float]]:
    """Yield what was timed, its variant, and milliseconds as measured and as modelled; 0 where there are none."""
    reached = gpu_model.fit(records)

    def row(title: str, record: str, variant: str, figures: dict[str, Any]) -> tuple[str, str, float, float]:
        taken = [each for each in figures.get("seconds", []) if each is not None]
        work = records.get(record, {}).get(variant)
        modelled = gpu_model.seconds(work, gpu_model.MODELLED[gpu], reached) if isinstance(work, list) else 0.0
        return title, variant, milliseconds(taken) if taken else 0.0, 1e3 * modelled

    for name, variants in found.get("networks", {}).items():
        batch, size = found["sizes"][name]
        for variant, figures in variants.items():
            record = f"{gpu_model.TIMED}{name}" if (batch, size) == gpu_model.SIZES[name] else ""
            yield row(f"{name}, {batch} of {size}", record, variant, figures)
    for name, figures in found.get("parts", {}).items():
        yield row(name, f"{gpu_model.PART}{name}", "call", figures)


def cells(row: tuple[str, str, float, float]) -> list[str]:
    title, variant, taken, modelled = row
    figures = [f"{each:.3g}" if each else "-" for each in (taken, modelled)]
    return [title, variant, *figures, f"{modelled / taken:.2f}" if taken and modelled else "-"]
