"""Training and inference of well-known networks, time and peak memory: FP32, mxmp, ``mxnet.contrib.amp``, PyTorch.

    python scripts/bench_models.py                              # all that have no result yet; may be ended and goes on
    python scripts/bench_models.py resnet50 bert --rounds 30
    python scripts/bench_models.py mobilenetv3_small --tasks training   # any classification network of GluonCV
    python scripts/bench_models.py --torch ~/torch/bin/python   # PyTorch's CPU autocast too, from that Python
    python scripts/make_benchmarks_page.py                      # the table and the picture

Each variant is a process of its own (``contrib.amp`` patches MXNet for good). They take turns, one whole step each,
which ends with ``mx.nd.waitall()``, in an order that alternates; kept are the seconds of every step. Peak memory is
the process's largest resident set, so networks are compared with the interpreter and its libraries in it. Last, each
runs a few steps under MXNet's profiler, for the share of its matrix operators. Tuning has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from sweep.models import read, write

from bench.networks import NETWORKS, network
from bench.turns import Worker, WorkerError, take_turns

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE.parent / "docs" / "model-benchmarks.json"
TASKS = ("training", "inference")
VARIANTS = ("float32", "rules", "tuned", "contrib.amp")
TORCH = ("torch.float32", "torch.autocast")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}, or GluonCV's names (default: these)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all, tuned where mxmp.tune exists")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with torch and torchvision, to compare with")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before the first that counts")
    parser.add_argument("--batch", type=int, help="default: the network's own")
    parser.add_argument("--size", type=int, help="of an image's side or a sequence; default: the network's own")
    # MXNet takes half of the logical processors where OMP_NUM_THREADS does not say (src/engine/openmp.cc).
    default = max(1, len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--threads", type=int, default=default, help="OpenMP threads of each (MXNet's: %(default)d)")
    parser.add_argument("--seconds", type=float, default=1800, help="limit of time of a step, or of tuning")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure again what has a result")
    args = parser.parse_args(arguments)
    import mxmp

    chosen = args.variants or [v for v in VARIANTS if v != "tuned" or hasattr(mxmp, "tune")]
    for name in args.networks or NETWORKS:
        variants = [*chosen, *(TORCH if args.torch and network(name).torch else ())]
        for task in args.tasks:
            key = f"{name}, {task}" + (f", {args.dtype}" if args.dtype != "bfloat16" else "")
            done = read(args.results).get(key, {})
            if not args.again and done.get("variants", {}).keys() >= set(variants):
                continue
            print(f"{key}: ", end="", flush=True)
            found = measure(name, task, variants, args)
            write(args.results, {**read(args.results), key: found})
            print(", ".join(f"{v} {told(f)}" for v, f in found["variants"].items()), flush=True)


def told(figures: dict[str, Any]) -> str:
    from statistics import median

    if "error" in figures:
        return figures["error"]
    counted = [each for each in figures["seconds"] if each is not None]
    return f"{1e3 * median(counted):.1f} ms" if counted else "every step was skipped: raise --warmup"


def measure(name: str, task: str, variants: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one network and task, side by side."""
    chosen = network(name)
    batch, size = args.batch or chosen.batch, args.size or chosen.size
    workers: dict[str, Worker] = {}
    found: dict[str, Any] = {}
    folder = tempfile.TemporaryDirectory()
    config = {"network": name, "task": task, "dtype": args.dtype, "batch": batch, "size": size}
    config["plan"] = str(Path(folder.name, "plan.json"))

    def start(variant: str) -> Worker:
        uses_torch = variant in TORCH
        return Worker(
            HERE / "bench" / ("torch_worker.py" if uses_torch else "mxnet_worker.py"),
            {**config, "variant": variant},
            python=args.torch if uses_torch else sys.executable,
            threads=args.threads,
            seconds=args.seconds,
        )

    tuning = None
    try:
        for variant in variants:
            try:
                if variant == "tuned":
                    tuner = start("tuning")
                    tuning = tuner.ready
                    tuner.stop()
                workers[variant] = start(variant)
            except WorkerError as error:
                found[variant] = {"error": str(error)}
        times, failed = take_turns(workers, args.warmup, args.rounds)
        for variant, error in failed.items():
            found[variant] = {"error": error}
        for variant, taken in times.items():
            found[variant] = {
                "seconds": taken,
                "prepared": workers[variant].ready["prepared"],
                **workers[variant].ask("memory"),
            }
        for variant in times:
            try:
                found[variant].update(workers[variant].ask("profile"))
            except WorkerError as error:
                found[variant]["not_profiled"] = str(error)
        if tuning is not None and "tuned" in times:
            found["tuned"]["tuning"] = tuning
    finally:
        for worker in workers.values():
            worker.stop()
        folder.cleanup()
    machine = {"cpu": cpu(), "threads": args.threads, "python": platform.python_version()}
    ordered = {variant: found[variant] for variant in variants}
    return {"title": chosen.title, "task": task, "dtype": args.dtype, "batch": batch, "size": size, **machine,
            "variants": ordered}  # fmt: skip


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
