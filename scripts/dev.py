"""The project's tools behind one command.

python scripts/dev.py --list             # every command, with what it does
python scripts/dev.py bench layouts      # one of them; --help shows its options
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from pathlib import Path

HELP = (["-h"], ["--help"], ["--list"])
COMMANDS = {  # by name: the module whose main() runs it, and what it does
    "bench models": ("bench.models", "times whole steps of well-known networks: FP32, mxmp, contrib.amp"),
    "bench inference": ("bench.inference", "times and compares graphs for inference: FP32 fused, bfloat16, INT8"),
    "bench modules": ("bench.inference:modules", "times predictions of MXNet's Module, and of mxmp's in two dtypes"),
    "bench layouts": ("bench.parts:layouts", "times BatchNorm and grouped convolutions in oneDNN's slow layouts"),
    "bench products": ("bench.parts:products", "times FullyConnected in bfloat16 by the number of rows"),
    "bench update": ("bench.parts:update", "times the check of FP32 gradients and SGD's update on a CPU"),
    "bench updates": ("bench.trainer:updates", "times step() of mxmp.Trainer and gluon.Trainer, by optimizer"),
    "bench watch": ("bench.trainer:watching", "times steps under mxmp.diagnose.watch"),
    "bench environment": ("bench.environment", "times FP32 steps by OpenMP threads, how they wait, and data workers"),
    "bench after-tune": ("bench.after_tune", "times a network before and after its process calls mxmp.tune"),
    "bench host": ("bench.host", "counts the operators of a step and times the thread that pushes them"),
    "bench trees": ("bench.trees", "times first calls and steps on the host by this mxmp and by another commit's"),
    "bench adaptive-scale": ("bench.adaptive_scale", "counts zero gradients under the two dynamic loss scalers"),
    "bench gpu-parts": ("bench.gpu_parts", "times layouts and MXNet's fusion on a GPU"),
    "sweep models": (
        "sweep.models",
        "measures every model of the zoos in both dtypes: results/models.json",
    ),
    "sweep operators": (
        "sweep.operators.run",
        "measures every operator that may compute low: results/kernels.json",
    ),
    "sweep workarounds": (
        "sweep.workarounds",
        "finds which workarounds this MXNet needs: results/workarounds.json",
    ),
    "sweep simulated": (
        "sweep.operators.simulated",
        "computes float16 kernels' machine code: results/kernels-gpu.json",
    ),
    "sweep fusion": (
        "sweep.fusion",
        "compares folded and fused graphs of every model: results/fusion.json",
    ),
    "sweep quantized": (
        "sweep.quantized",
        "measures what trained networks lose in INT8: results/int8.json",
    ),
    "sweep casts": (
        "sweep.casts",
        "counts the casts of every network's graphs, by policy: results/casts.json",
    ),
    "sweep decisions": (
        "sweep.decisions",
        "compares decisions with another commit's: results/decisions.json",
    ),
    "sweep plans": (
        "sweep.plans",
        "counts the casts of every network's plan for a GPU: results/plans.json",
    ),
    "sweep gpu-graphs": (
        "sweep.gpu_graphs",
        "records a step of every network on the null GPU: results/gpu-graphs.json",
    ),
    "sweep gpu-times": (
        "sweep.gpu_times",
        "records the work of a step's kernels for a model: results/gpu-times.json",
    ),
    "sweep simulated-gpu": (
        "sweep.simulated_gpu",
        "trains digits on the simulated GPU: results/simulated-gpu.json",
    ),
    "parity": ("parity.run", "trains every family of examples/recipes/ in three dtypes: results/parity/"),
    "check beginnings": ("parity.beginning", "says where a family's training begins otherwise than it did"),
    "pages models": ("pages.models", "writes docs/models.md and its picture"),
    "pages kernels": ("pages.kernels", "writes docs/kernels.md"),
    "pages rules": ("pages.rules", "writes docs/rules.md"),
    "pages workarounds": ("pages.workarounds", "writes docs/workarounds.md"),
    "pages gpu-graphs": ("pages.gpu_graphs", "writes docs/gpu-graphs.md and its picture"),
    "pages benchmarks": ("pages.benchmarks", "writes docs/model-benchmarks.md and its picture"),
    "pages parity": ("pages.parity", "writes docs/parity.md and its pictures"),
    "pages looking-inside": ("pages.looking_inside", "draws the pictures of docs/looking-inside.md"),
    "check equal-workers": ("checks.equal_workers", "fails where two workers' weights differ, for every optimizer"),
    "check audit": ("checks.audit", "counts planted operators that audit names first, and healthy nets it is quiet on"),
    "check verify": ("checks.verify", "counts ported programs, right and wrong ones, that verify answers right"),
    "check faults": ("checks.faults", "plants faults in a copy of mxmp, and fails where the tests do not notice one"),
    "check libraries": ("checks.libraries", "trains nets of GluonCV, GluonNLP, GluonTS and Sockeye in three dtypes"),
    "check closure": ("checks.closure", "counts the lines of code that a training through mxmp loads, file by file"),
    "check site": ("checks.site", "fails where a search of the built manual leads to another page than it should"),
    "check ways": ("checks.ways", "counts how often who follows a conversion, or tune, changes files, and lists where"),
    "check words": ("checks.words", "lists private words and docstrings that are too long, and counts their lines"),
    "check tensor-core": ("gpu.tensor_core", "records a Tensor Core for the tests; needs a GPU"),
    "check gpu-acceptance": ("checks.gpu_acceptance", "tries mxmp on a GPU; scripts/gpu_acceptance.sh sets it up"),
    "check gpu-model": ("checks.gpu_model", "holds gpu-acceptance.json against the model of a GPU's time"),
    "demo": ("demo", "trains a network on real digits in three dtypes and compares the runs"),
    "digits": ("support.digits", "packs scikit-learn's digits into RecordIO files"),
}


def main(arguments: list[str]) -> int:
    if arguments in ([], *HELP):
        print(__doc__)
        return listed("")
    name = next((name for count in (1, 2) if (name := " ".join(arguments[:count])) in COMMANDS), None)
    if name is None:
        return unknown(arguments)
    root = Path(__file__).resolve().parents[1]
    sys.path[1:1] = [str(root), str(root / "scripts" / "lab")]
    warnings.simplefilter("ignore")
    if name.startswith(("bench", "check")):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv[0] = f"dev.py {name}"
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")(arguments[len(name.split()) :]) or 0


def listed(group: str) -> int:
    """Print the commands of a group, or all."""
    for name, (_, does) in COMMANDS.items():
        if name.startswith(group):
            print(f"{name:22} {does}")
    return 0


def unknown(arguments: list[str]) -> int:
    """Print a group's commands, or that there is no such command."""
    group = f"{arguments[0]} "
    if arguments[1:] in ([], *HELP) and any(name.startswith(group) for name in COMMANDS):
        return listed(group)
    given = " ".join(arguments[:2])
    near = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    print(f"dev.py: there is no command {given!r}; {hint}--list shows all", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
