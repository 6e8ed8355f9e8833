"""Train the demo's network on digits on the simulated GPU and on the CPU: results/simulated-gpu.json. No GPU is needed.

    python scripts/dev.py sweep simulated-gpu

Weights, batches and hyper-parameters are the same in all runs. On the simulated GPU the machine code of MXNet's kernels
computes; on the CPU float16 is emulated, with all roundings of a GPU's kernels. One run goes without oneDNN: it sums in
another order, and shows how far FP32 runs part. A sweep that was ended goes on after the last whole epoch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo
from support import digits
from support.options import parse
from support.results import FOLDER, ROOT, chosen, read, write

RESULTS = FOLDER / "simulated-gpu.json"
RUNS = {  # by name: the device, and the policy (without it the example takes float16-fast: the same graph here)
    "CPU float32": ("cpu", "float32"),
    "CPU float32, without oneDNN": ("cpu", "float32"),
    "GPU float32": ("gpu", "float32"),
    "CPU float16": ("cpu", "float16"),
    "GPU float16": ("gpu", "float16"),
}
MODEL = "cifar_resnet20_v1"


def main(arguments: list[str] | None = None) -> None:
    folder = (ROOT / "demo", "where data and checkpoints go")
    options = parse(__doc__, arguments, "names", names=([str], "runs (default: all)"), results=RESULTS, folder=folder)
    print("data: {} digits to train on, {} to validate on".format(*digits.make(options.folder / "data")))
    for name in chosen(list(RUNS), options.names, "run"):
        work = options.folder / "simulated-gpu" / name.replace(",", "").replace(" ", "-").lower()
        merge(options.results, name, work)
        done = read(options.results).get(name, [])
        if command := todo(name, work, options.folder / "data", len(done)):
            subprocess.run(command, cwd=ROOT, env=environment(name), check=True)
            merge(options.results, name, work)


def todo(name: str, work: Path, data: Path, done: int) -> list[str]:
    """Return the command that trains the epochs which are not done, empty where all are."""
    if done == int(demo.HYPER_PARAMETERS.split("--num-epochs ")[1].split()[0]):
        return []
    device, policy = RUNS[name]
    given: dict[str, Any] = {"dtype": policy, "policy": policy, "num-gpus": int(device == "gpu")}
    if policy == "float32":
        del given["policy"]
    given.update({"rec-train": data / "train.rec", "rec-val": data / "val.rec", "results": work / "results.json"})
    given.update({"save-frequency": 1, "save-dir": work})
    if done:
        stem = work / f"{MODEL}-{done}"
        given.update({"resume-epoch": done, "resume-params": f"{stem}.params", "resume-states": f"{stem}.states"})
    python = ["bash", "scripts/simgpu.sh", "python"] if device == "gpu" else [sys.executable]
    extra = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    return [*python, "examples/imagenet_gluon.py", *demo.HYPER_PARAMETERS.split(), *extra]


def environment(name: str) -> dict[str, str]:
    """One operation after the other, so that each run is the same."""
    variables = {"MXNET_ENGINE_TYPE": "NaiveEngine", "OMP_NUM_THREADS": "1"}
    variables["MXNET_STORAGE_FALLBACK_LOG_VERBOSE"] = "0"
    variables["MXMP_WITH"] = "rounded_products,rounded_outputs"
    variables["MXNET_MKLDNN_ENABLED"] = str(int("without oneDNN" not in name))
    return {"PYTHONWARNINGS": "ignore", **os.environ, **variables}


def merge(path: Path, name: str, work: Path) -> None:
    """Add to the results the epochs that a process has left."""
    results = read(path)
    done = results.get(name, [])
    history = read(work / "results.json").get("history", [])
    results[name] = done + [figures(each) for each in history if each["epoch"] > len(done)]
    write(path, {each: results[each] for each in RUNS if results.get(each)})


def figures(epoch: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of an epoch; ``train_loss`` has the mean of each nine steps."""
    loss = {"train_loss": [round(each, 4) for each in epoch["train_loss"]], "loss": round(epoch["loss"], 4)}
    counts = {key: epoch[key] for key in ("loss_scale", "skipped_steps")}
    return {**loss, "top1": round(epoch["top1"], 6), **counts, "seconds": round(epoch["seconds"], 1)}
