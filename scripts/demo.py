"""Trains one GluonCV network on real digits in float32, float16 and bfloat16, and compares the runs.

Three runs go through Gluon, and one through the Symbolic Module. Each is a process of its own,
`python examples/imagenet_gluon.py ...`, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

from support import digits
from support.results import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from imagenet_common.compare import draw, print_table

from mxmp.host import cpu

RUNS = {
    "float32": ("imagenet_gluon.py", "float32"),
    "float16": ("imagenet_gluon.py", "float16"),
    "bfloat16": ("imagenet_gluon.py", "bfloat16"),
    "float16, Symbolic": ("imagenet_symbolic.py", "float16"),
}
HYPER_PARAMETERS = (
    "--model cifar_resnet20_v1 --num-classes 10 --input-size 32 --crop-ratio 1 --augment shift "
    "--batch-size 32 --num-epochs 10 --optimizer sgd "
    "--lr 0.05 --lr-mode cosine --warmup-epochs 1 --wd 0.0005 --no-wd --label-smoothing "
    "--seed 1 --num-workers 2 --log-interval 9 --save-frequency 0"
)


def train(name: str, data: Path, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Run the example once in its own process."""
    example, dtype = RUNS[name]
    results = folder / f"{name.replace(', ', '-').lower()}.json"
    files = ["--rec-train", str(data / "train.rec"), "--rec-val", str(data / "val.rec"), "--results", str(results)]
    script = os.path.relpath(ROOT / "examples" / example)
    command = [sys.executable, script, *HYPER_PARAMETERS.split(), *files, "--dtype", dtype, *extra]
    print("\n==> " + " ".join(map(shlex.quote, ["python", *command[1:]])), flush=True)
    status = subprocess.run(command, env={"PYTHONWARNINGS": "ignore", **os.environ})
    if status.returncode:
        sys.exit(f"error: the {name} run failed (status {status.returncode})")
    return {**json.loads(results.read_text()), "label": name}


def verdict(runs: Sequence[dict[str, Any]]) -> list[str]:
    """List what is short of the promise: 97 % in float32, the others within a point of it."""
    base = runs[0]["top1"]
    short = [] if base >= 0.97 else [f"float32 reached {100 * base:.2f} %, less than 97 %"]
    for run in runs[1:]:
        if abs(run["top1"] - base) > 0.01 + 1e-9:
            short.append(f"{run['label']} is {100 * (run['top1'] - base):+.2f} points from float32")
    return short


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where data and results go")
    # Without AVX-512 a cast to bfloat16 takes 200 ns an element (oneDNN's reference code): ten epochs take hours.
    usual = [name for name in RUNS if name != "bfloat16" or cpu.multiplies_bfloat16()]
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=usual)
    parser.add_argument("--epochs", type=int, default=3, help="too few to judge the accuracy by (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="ten epochs, as in the manual's picture, and judged")
    options, extra = parser.parse_known_args(arguments)
    if not options.whole:
        extra += ["--num-epochs", str(options.epochs), "--warmup-epochs", "0"]
    start = time.perf_counter()
    if "bfloat16" not in options.runs:
        print("==> bfloat16 is left out: on a CPU without AVX-512 it is emulated, slowly (--runs bfloat16 runs it)")
    elif cpu.multiplies_bfloat16_slowly():
        print("==> bfloat16 is slower than float32 on this CPU: docs/choosing-a-dtype.md says why")
    print("==> data: {} digits to train on, {} to validate on".format(*digits.make(options.folder / "data")))
    runs = [train(name, options.folder / "data", options.folder, extra) for name in options.runs]
    picture = options.folder / "curves.png"
    draw(runs, picture)
    print()
    print_table(runs)
    print(f"curves: {os.path.relpath(picture)}; whole demo: {time.perf_counter() - start:.0f} s")
    short = verdict(runs) if runs[0]["label"] == "float32" and options.whole else []
    for line in short:
        print(f"not as promised: {line}", file=sys.stderr)
    return 1 if short else 0
