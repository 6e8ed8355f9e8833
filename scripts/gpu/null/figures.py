"""What one training step asks of a GPU: launches, library calls, bytes cast and peak memory of a network.

    bash scripts/nullgpu.sh python -m gpu.null.figures resnet50_v1b --batch 16 --size 224
    bash scripts/nullgpu.sh python -m gpu.null.figures bert_4_base --how float32 float16 --json

Each variant is trained for three steps in a process of its own, hybridized with ``static_alloc`` and ``static_shape``,
by SGD with momentum; the last step is counted. MXNet's NaiveEngine does one thing after the other, so that the peak of
memory is the same each time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any, Callable

from support.zoo.case import Case, images
from support.zoo.catalogue import CASES

from .networks import FAMILIES, bert
from .record import Event, Record, peak_bytes, recording
from .training import AMP, FP32, Training

VARIANTS = (FP32, AMP, "float16", "float16-fast")
STEPS = 3
OTHERS: dict[str, Callable[[], Case]] = {"bert_4_base": lambda: bert(4, 768, 12, 48, 128, 30522)}


def recorded_step(case: Case, how: str) -> tuple[Record, Record]:
    """Forward and backward, and the trainer's step; ``how``: one of ``VARIANTS`` or a policy. Needs a fresh process."""
    training = Training(case, how, static_alloc=True, static_shape=True)
    for _ in range(STEPS):
        with recording() as passes:
            training.forward_backward()
        with recording() as step:
            training.step()
    return passes, step


def figures(passes: Record, step: Record) -> dict[str, Any]:
    """The counts of a recorded step.

    Returns
    -------
    dict
        ``peak_bytes``: the most that MXNet held, its pool included. ``launches``: kernels of forward and backward,
        ``step_launches``: of the trainer's step, both with fused ones and without those inside library calls.
        ``matrix_calls``: of convolutions, products and recurrent layers by dtype, dtype of the sums, and math mode.
        ``library_calls``: all, matrix calls among them. ``casts``, ``bytes_cast``: kernels that do nothing but cast,
        and what they read and write. ``fused_casts``: kernels in which the fusion has joined a cast with others.
    """
    return {
        "peak_bytes": peak_bytes(),
        "launches": len(passes.launches),
        "step_launches": len(step.launches),
        "matrix_calls": dict(Counter(map(kind_of, passes.matrix_calls))),
        "library_calls": len(passes.calls) + len(step.calls),
        "casts": len(passes.casts),
        "bytes_cast": passes.bytes_cast,
        "fused_casts": fused_casts(passes),
    }


def kind_of(call: Event) -> str:
    """As "f16, sums f32, TENSOR_OP"."""
    return f"{'*'.join(sorted(call.dtypes))}, sums {call.details['compute']}, {call.details['math']}"


def fused_casts(record: Record) -> int:
    return sum(bool(re.search(r"cast", event.name, re.I)) for event in record.of("fused"))


def resized(case: Case, batch: int | None, size: int | None) -> Case:
    """With pictures of another number and size."""
    if batch is None and size is None:
        return case
    first = case.inputs()[0]
    shape = (batch or first.shape[0], first.shape[1], size or first.shape[2], size or first.shape[3])
    return replace(case, inputs=lambda: [images(*shape)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="networks of support.zoo, families of networks.py, bert_4_base")
    parser.add_argument("--how", nargs="+", default=list(VARIANTS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int, help="height and width of pictures")
    parser.add_argument("--json", action="store_true", help="a line for each network and variant")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name in args.names:
        if args.here:
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            case = resized({**CASES, **FAMILIES, **OTHERS}[name](), args.batch, args.size)
            print(json.dumps(figures(*recorded_step(case, args.how[0]))))
            return
        found = {how: apart(name, how, args) for how in args.how}
        if args.json:
            for how, numbers in found.items():
                print(json.dumps({"network": name, "how": how, **numbers}))
        else:
            print(table(name, found))


def apart(name: str, how: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures, from a process of their own; or its last line, where it fails."""
    sizes = [word for key in ("batch", "size") if getattr(args, key) for word in (f"--{key}", str(getattr(args, key)))]
    command = [sys.executable, "-W", "ignore", "-m", "gpu.null.figures", "--here", name, "--how", how, *sizes]
    env = {**os.environ, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "naive_engine" not in line]
        return {"error": lines[-1] if lines else str(done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def table(name: str, found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, *found]]
    for key in dict.fromkeys(key for numbers in found.values() for key in numbers):
        rows.append([key, *(cell(key, numbers.get(key)) for numbers in found.values())])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("peak_bytes", "bytes_cast"):
        return f"{value / 1e6:.0f} MB"
    if isinstance(value, dict):
        return "; ".join(f"{count} {what}" for what, count in sorted(value.items()))
    return str(value)


if __name__ == "__main__":
    main()
