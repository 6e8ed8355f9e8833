"""Try mxmp on a real GPU: its tests, its products beside the CPU's emulation, step time and memory of three networks.

``bash scripts/gpu_acceptance.sh`` sets up MXNet's CUDA build and runs this. Everything found goes into one JSON file
and is printed; what fails is a result, and the exit status is 1. Networks are trained at a batch as one trains with, in
processes that take turns: FP32, ``mxnet.contrib.amp``, ``float16`` and ``float16-fast``. Layouts of convolutions and
BatchNorm, and MXNet's fusion, are timed alone. ``dev.py check gpu-model FILE`` holds the times against the model.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx
from bench import gpu_parts, models
from gpu import tensor_core
from support.gpu_model import SIZES, VARIANTS
from support.options import parse
from support.pages import table
from support.results import ROOT, read

import mxmp
from mxmp.host import cpu

QUICK = {"resnet50": (8, 64)}
STEPS = ("gpu tests", "recording", "emulation", "timing of parts")


def main(arguments: list[str] | None = None) -> int:
    args = parse(
        *(__doc__, arguments),
        output=(ROOT / "gpu-acceptance.json", "the file to send"),
        quick=(False, "one network at a small batch"),
    )
    if not mx.context.num_gpus():
        sys.exit("error: MXNet sees no GPU. Its wheels run on V100, T4 and A100; see nvidia-smi for what is here.")
    found: dict[str, Any] = {"machine": machine(), "started": time.strftime("%Y-%m-%d %H:%M")}
    recording = args.output.with_suffix(".npz")
    found["gpu tests"] = tests("-m", "gpu", "tests/gpu")
    found["recording"] = called(
        [sys.executable, "scripts/dev.py", "check", "tensor-core", "--by", "mxnet", "--output", str(recording)], {}
    )
    found["emulation"] = tests("tests/features/test_tensor_core.py", MXMP_TENSOR_CORE=str(recording))
    found["timing of parts"], found["parts"] = parts(args.output, rounds=3 if args.quick else 11)
    found["sizes"] = QUICK if args.quick else SIZES
    found["networks"] = networks(found["sizes"], args.output)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report(found)}\n\n{args.output} and {recording} hold the results: please send both with an issue.")
    failed = [step for step in STEPS if found[step]["status"]]
    return int(bool(failed) or any("error" in each for of in found["networks"].values() for each in of.values()))


def machine() -> dict[str, Any]:
    versions = {"mxmp": mxmp.__version__, "mxnet": mx.__version__, "python": platform.python_version()}
    return {**tensor_core.nvidia_smi(), **versions, "cpu": cpu.model()}


def tests(*arguments: str, **environment: str) -> dict[str, Any]:
    """Return how pytest ended, its last line, and the lines of what failed."""
    return called([sys.executable, "-m", "pytest", "-q", "-rfE", *arguments], environment)


def called(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    print(f"==> {' '.join(command[1:])}", flush=True)
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "last": lines[-1] if lines else "", "failed": failed}


def parts(output: Path, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how the timing of parts ended, and their seconds; in a process, so that its memory is free again."""
    results = output.with_suffix(".parts.json")
    command = [sys.executable, "scripts/dev.py", "bench", "gpu-parts", "--rounds", str(rounds), "--results"]
    ended = called([*command, str(results)], {})
    found = read(results)
    results.unlink(missing_ok=True)
    return ended, found


def networks(sizes: dict[str, tuple[int, int]], output: Path) -> dict[str, Any]:
    """Return seconds of steps and peak memory by network and variant."""
    results = output.with_suffix(".steps.json")
    results.unlink(missing_ok=True)
    for name, (batch, size) in sizes.items():
        command = [name, "--tasks", "training", "--device", "gpu", "--dtype", "float16", "--results", str(results)]
        models.main([*command, "--batch", str(batch), "--size", str(size), "--variants", *VARIANTS])
    found = {key.split(",")[0]: result["variants"] for key, result in read(results).items()}
    results.unlink(missing_ok=True)
    return found


def report(found: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [f"{key}: {value}" for key, value in found["machine"].items()]
    for step in filter(found.get, STEPS):
        lines.append(f"{step}: {'ok' if not found[step]['status'] else 'FAILED'}, {found[step]['last']}")
        lines += found[step]["failed"]
    rows = []
    for name, variants in found["networks"].items():
        plain = variants.get("float32", {})
        for variant, figures in variants.items():
            rows.append([name, variant, models.summary(figures, plain), *memory(figures, plain)])
    head = "network | variant | step, times as fast as FP32 | peak memory, MB | of FP32's"
    timed = table("part | ms", ([name, gpu_parts.shown(each)] for name, each in found.get("parts", {}).items()))
    return "\n".join([*lines, "", table(head, rows), "", timed])


def memory(figures: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Return the peak memory that a variant took for its steps, in MB, and its share of FP32's, as text."""
    used, by_plain = (each.get("peak", 0) - each.get("before", 0) for each in (figures, plain))
    return [f"{used / 1e6:.0f}" if used else "-", f"{used / by_plain:.2f}" if used and by_plain else "-"]
