"""Inference of well-known networks by ``mxmp.optimize_for_inference``: times as fast as FP32 unfused, and SQNR.

Random weights, running statistics that saw data, photographs. Every candidate is timed, whatever it loses; they take
turns. "served" is the returned block, which runs the fastest candidate, called in this process. Networks are those of
``networks.py`` or GluonCV's classification networks; a run that was ended goes on with what ``--results`` has.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import autograd
from support.options import parse
from support.results import FOLDER, read, write

import mxmp
from bench.networks import images, network
from bench.turns import bench, in_turns

NAMES = ["resnet50_v1b", "mobilenetv2_1.0", "mobilenetv3_small", "resnet18_v2", "vgg16", "googlenet", "bert"]
COLUMNS = ("float32, fused", "bfloat16", "int8")
HEAD = f"| network, batch | FP32 | {' | '.join(COLUMNS)} | served | search, s |", f"|{'---|' * (len(COLUMNS) + 4)}"


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "networks"),
        networks=([str], f"default: {', '.join(NAMES)}"),
        batch=[1, 32],
        size=112,
        results=(FOLDER / "inference.json", "the file that a run goes on with"),
    )
    path = Path(args.results)
    found = read(path)
    print("\n".join(HEAD))
    for name in args.networks or NAMES:
        for batch in args.batch:
            size = args.size if takes_images(name) else network(name).size
            key = f"{name}, {batch} at {size}"
            if key not in found:
                found[key] = measured(name, batch, size)
                write(path, found)
            print(row(key, found[key]), flush=True)


def measured(name: str, batch: int, size: int) -> dict[str, Any]:
    """Return each candidate's milliseconds, SQNR and verdict, and the seconds that the search took."""
    net = warmed(name, size)
    data = [network(name).inputs(batch, size)[0] * scale for scale in (1.0, 0.9, 1.1)]
    start = time.perf_counter()
    fast: Any = mxmp.optimize_for_inference(net, data, evaluate=lambda served: 1.0)
    seconds, report = time.perf_counter() - start, fast.report
    rows = {each.name: [each.milliseconds, each.sqnr, each.verdict] for each in report.candidates}
    # The search times executors in a process of its own; this is what a user calls.
    served = in_turns({"FP32": partial(net, data[0]), "served": partial(fast, data[0])}, rounds=11)
    gains = [plain / own for plain, own in zip(*served.values())]
    return {"candidates": rows, "served": statistics.median(gains), "seconds": seconds, "notes": report.notes}


def warmed(name: str, size: int, steps: int = 10) -> Any:
    """Return a network whose running statistics saw data: without, some networks' outputs are denormal."""
    mx.random.seed(0)
    net = network(name).make()
    net.initialize(mx.init.Xavier("gaussian", "in", 2), force_reinit=True)
    net.hybridize()
    for _ in range(steps):
        with autograd.record():
            outputs = net(*network(name).inputs(4, size))
            loss = (outputs[0] if isinstance(outputs, (list, tuple)) else outputs).sum()
        loss.backward()
    mx.nd.waitall()
    return net


def takes_images(name: str) -> bool:
    """Return whether a network's input is a batch of images, of any size."""
    return network(name).inputs is images


def modules(arguments: list[str] | None = None) -> None:
    """Time predictions of ``mx.mod.Module``, fused by MXNet, against those of ``mxmp.Module`` in FP32 and bfloat16."""
    args = parse(
        *(modules.__doc__, arguments, "networks"),
        networks=([str], f"default: {', '.join(NAMES)}"),
        batch=[1, 32],
        size=112,
        rounds=21,
    )
    names = [name for name in args.networks or NAMES if takes_images(name)]
    rows = (((name, batch), predictions(name, batch, args.size)) for name in names for batch in args.batch)
    bench("network | batch", rows, args.rounds)


def predictions(name: str, batch: int, size: int) -> dict[str, Any]:
    """Return a call that predicts a batch, for each kind of module."""
    net = warmed(name, size)
    (data,) = images(batch, size)
    with tempfile.TemporaryDirectory() as folder:
        net(data)
        net.export(f"{folder}/net")
        symbol, *values = mx.model.load_checkpoint(f"{folder}/net", 0)

    def bound(kind: Any, **options: Any) -> Any:
        module = kind(symbol, label_names=None, **options)
        module.bind([("data", data.shape)], for_training=False)
        module.set_params(*values)
        return partial(module.forward, mx.io.DataBatch([data]), is_train=False)

    full = mxmp.Policy("bfloat16", exclude=["*"])
    return {
        "mx.mod.Module": bound(mx.mod.Module),
        "mxmp.Module in FP32": bound(mxmp.Module, policy=full),
        "in bfloat16": bound(mxmp.Module, policy="bfloat16"),
    }


def row(key: str, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    candidates = found["candidates"]
    plain = candidates["float32"][0]
    cells = []
    for name in COLUMNS:
        milliseconds, ratio, verdict = candidates.get(name, (None, None, "none"))
        cells.append(f"{plain / milliseconds:.2f} ({ratio:.0f} dB)" if milliseconds else verdict)
    served = f"{found['served']:.2f}" if "served" in found else "-"
    return f"| {key} | {plain:.1f} ms | {' | '.join(cells)} | {served} | {found['seconds']:.0f} |"
