"""Inference of well-known networks by ``mxmp.optimize_for_inference``: times as fast as FP32 unfused, and SQNR.

Random weights, running statistics that saw data, photographs. Every candidate is timed, whatever it loses; they take
turns. Networks are those of ``networks.py`` or GluonCV's classification networks; a run that was ended goes on with
what ``--results`` has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.options import parse
from support.results import read, write

from bench.networks import images, network

NAMES = ["resnet50_v1b", "mobilenetv2_1.0", "mobilenetv3_small", "resnet18_v2", "vgg16", "googlenet"]
COLUMNS = ("float32, fused", "bfloat16", "int8")


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "networks"),
        networks=([str], f"default: {', '.join(NAMES)}"),
        batch=[1, 32],
        size=112,
        results=("inference.json", "the file that a run goes on with"),
    )
    path = Path(args.results)
    found = read(path)
    print(f"| network, batch at {args.size} | FP32 | {' | '.join(COLUMNS)} | seconds |\n|{'---|' * (len(COLUMNS) + 3)}")
    for name in args.networks or NAMES:
        for batch in args.batch:
            key = f"{name}, {batch} at {args.size}"
            if key not in found:
                found[key] = measured(name, batch, args.size)
                write(path, found)
            print(row(key, found[key]), flush=True)


def measured(name: str, batch: int, size: int) -> dict[str, Any]:
    """Return each candidate's milliseconds, SQNR and verdict, and the seconds that the search took."""
    import time

    import mxmp

    net = warmed(name, size)
    data = [images(batch, size)[0] * scale for scale in (1.0, 0.9, 1.1)]
    start = time.perf_counter()
    report = mxmp.optimize_for_inference(net, data, evaluate=lambda served: 1.0).report
    rows = {each.name: [each.milliseconds, each.sqnr, each.verdict] for each in report.candidates}
    return {"candidates": rows, "seconds": time.perf_counter() - start, "notes": report.notes}


def warmed(name: str, size: int, steps: int = 10) -> Any:
    """Return a network whose running statistics saw data: without, some networks' outputs are denormal."""
    import mxnet as mx
    from mxnet import autograd

    mx.random.seed(0)
    net = network(name).make()
    net.initialize(mx.init.Xavier("gaussian", "in", 2), force_reinit=True)
    net.hybridize()
    for _ in range(steps):
        with autograd.record():
            loss = net(images(4, size)[0]).sum()
        loss.backward()
    mx.nd.waitall()
    return net


def row(key: str, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    candidates = found["candidates"]
    plain = candidates["float32"][0]
    cells = []
    for name in COLUMNS:
        milliseconds, ratio, verdict = candidates.get(name, (None, None, "none"))
        cells.append(f"{plain / milliseconds:.2f} ({ratio:.0f} dB)" if milliseconds else verdict)
    return f"| {key} | {plain:.1f} ms | {' | '.join(cells)} | {found['seconds']:.0f} |"
