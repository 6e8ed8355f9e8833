"""Training and inference of well-known networks, time and peak memory: FP32, mxmp, ``mxnet.contrib.amp``.

Each variant is a process of its own (``contrib.amp`` patches MXNet for good). They take turns, one whole step each,
which ends with ``mx.nd.waitall()``, in an order that alternates; kept are the seconds of every step. Peak memory is
the process's largest resident set, so networks are compared with the interpreter and its libraries in it; with
``--device gpu`` it is the GPU's. Last, each runs a few steps under MXNet's profiler, for the share of its matrix
operators. Tuning has a process of its own. A variant may also be a policy of mxmp's, as ``float16-fast``. Printed are
medians, and how many times as fast as FP32 a variant is, with quartiles. Networks are those of ``networks.py`` or
GluonCV's classification networks; a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from support.options import parse
from support.results import FOLDER, read, write

from bench.networks import NETWORKS, network
from bench.turns import Worker, WorkerError, gain, milliseconds, take_turns
from mxmp.host import cpu

RESULTS = FOLDER / "model-benchmarks.json"
TASKS = ("training", "inference")
VARIANTS = ("float32", "rules", "tuned", "contrib.amp")


def main(arguments: list[str] | None = None) -> None:
    # MXNet takes half of the logical processors where OMP_NUM_THREADS does not say (src/engine/openmp.cc).
    default = max(1, len(os.sched_getaffinity(0)) // 2)
    args = parse(
        *(__doc__, arguments, "networks"),
        networks=([str], f"of {', '.join(NETWORKS)}, or GluonCV's names (default: these)"),
        tasks=(list(TASKS), "", TASKS),
        variants=(list(VARIANTS), f"of {', '.join(VARIANTS)}, or policies as float16-fast (default: these)"),
        dtype=("bfloat16", "", ("bfloat16", "float16")),
        policy=("", "added to the dtype, for example norm=float32"),
        rounds=15,
        warmup=(3, "rounds before the first that counts (default: 3)"),
        batch=(int, "default: the network's own"),
        size=(int, "of an image's side or a sequence; default: the network's own"),
        device=("cpu", "", ("cpu", "gpu")),
        threads=(default, "OpenMP threads of each (MXNet's: %(default)s)"),
        seconds=(1800.0, "limit of time of a step, or of tuning"),
        results=RESULTS,
        again=(False, "measure again what has a result"),
    )
    for name in args.networks or NETWORKS:
        for task in args.tasks:
            how = [args.dtype] * (args.dtype != "bfloat16" or bool(args.policy)) + [args.policy] * bool(args.policy)
            how += [args.device] * (args.device != "cpu") + [f"{args.threads} threads"] * (args.threads != default)
            key = ", ".join([name, task, *how])
            done = read(args.results).get(key, {})
            if not args.again and done.get("variants", {}).keys() >= set(args.variants):
                continue
            print(f"{key}: ", end="", flush=True)
            found = measure(name, task, args)
            write(args.results, {**read(args.results), key: found})
            shown = found["variants"]
            print(", ".join(f"{v} {summary(f, shown.get('float32', {}))}" for v, f in shown.items()), flush=True)


def summary(figures: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return the median of a variant, and how many times as fast as FP32 it is."""
    if "error" in figures:
        return figures["error"]
    if all(each is None for each in figures["seconds"]):
        return "every step was skipped: raise --warmup"
    faster = f" {gain(plain['seconds'], figures['seconds'])}" if "seconds" in plain and figures is not plain else ""
    return f"{milliseconds(figures['seconds']):.1f} ms{faster}"


def measure(name: str, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants of one network and task, side by side."""
    chosen = network(name)
    batch, size = args.batch or chosen.batch, args.size or chosen.size
    workers: dict[str, Worker] = {}
    found: dict[str, Any] = {}
    folder = tempfile.TemporaryDirectory()
    config = {"network": name, "task": task, "dtype": args.dtype, "batch": batch, "size": size, "device": args.device}
    config.update(plan=str(Path(folder.name, "plan.json")), policy=f"compute={args.dtype},{args.policy}".rstrip(","))

    def start(variant: str) -> Worker:
        script = Path(__file__).with_name("worker.py")
        return Worker(script, {**config, "variant": variant}, threads=args.threads, seconds=args.seconds)

    tuning = None
    try:
        for variant in args.variants:
            try:
                if variant == "tuned":
                    tuner = start("tuning")
                    tuning = tuner.ready
                    tuner.stop()
                workers[variant] = start(variant)
            except WorkerError as error:
                found[variant] = {"error": str(error)}
        times, failed = take_turns(workers, args.warmup, args.rounds)
        found.update({variant: {"error": error} for variant, error in failed.items()})
        for variant, taken in times.items():
            worker = workers[variant]
            found[variant] = {"seconds": taken, "prepared": worker.ready["prepared"], **worker.ask("memory")}
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
    machine = {"cpu": cpu.model(), "threads": args.threads, "python": platform.python_version()}
    ordered = {variant: found[variant] for variant in args.variants}
    dtype = ",".join(filter(None, [args.dtype, args.policy]))
    return {"title": chosen.title, "task": task, "dtype": dtype, "batch": batch, "size": size, **machine,
            "variants": ordered}  # fmt: skip
