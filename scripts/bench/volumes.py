"""3-D convolutions of video networks in bfloat16, casts from and to FP32 included: FP32's time divided by theirs.

    python scripts/bench_volumes.py
    OMP_NUM_THREADS=2 python scripts/bench_volumes.py

Each layer alone, forward and backward, at the sizes of a clip of 32 frames of 112x112. Variants take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from bench.turns import call_in_turns, gain

# Where it stands, data, filters, kernel, stride.
LAYERS = [
    ("I3D's stem", (1, 3, 32, 112, 112), 64, (5, 7, 7), (2, 2, 2)),
    ("R(2+1)D's stem", (1, 3, 16, 112, 112), 64, (1, 7, 7), (1, 2, 2)),
    ("C3D", (2, 64, 8, 28, 28), 128, (3, 3, 3), (1, 1, 1)),
    ("halving all axes", (2, 64, 8, 28, 28), 128, (3, 3, 3), (2, 2, 2)),
    ("halving the picture", (2, 128, 8, 28, 28), 128, (1, 3, 3), (1, 2, 2)),
    ("halving time", (2, 144, 8, 28, 28), 128, (3, 1, 1), (2, 1, 1)),
    ("shortcut", (2, 256, 8, 28, 28), 512, (1, 1, 1), (1, 2, 2)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    print("| layer | data | filters | kernel | stride | FP32 | bfloat16 |\n|---|---|---|---|---|---|---|")
    for where, data, filters, kernel, stride in LAYERS:
        steps = []
        for policy in (None, "bfloat16"):
            pad = tuple(size // 2 for size in kernel)
            net = nn.Conv3D(filters, kernel, stride, pad, in_channels=data[1])
            net.initialize()
            net.hybridize()
            if policy:
                mxmp.convert(net, policy)
            steps.append(step_of(net, mx.nd.random.normal(shape=data)))
        full, low = call_in_turns(steps, args.rounds)
        sizes = " | ".join("x".join(map(str, each)) for each in (data, (filters,), kernel, stride))
        print(f"| {where} | {sizes} | {statistics.median(full) * 1e3:.0f} ms | {gain(full, low)} |")


def step_of(net: gluon.HybridBlock, data: mx.nd.NDArray) -> Callable[[], None]:
    data.attach_grad()
    head = mx.nd.random.normal(shape=net(data).shape)

    def step() -> None:
        with autograd.record():
            out = net(data)
        out.backward(head)
        mx.nd.waitall()

    return step


if __name__ == "__main__":
    main()
