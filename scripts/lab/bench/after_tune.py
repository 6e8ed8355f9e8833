"""What ``tune`` leaves behind in the process that called it: threads, and the time of what runs afterwards."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon.model_zoo import vision
from support.options import parse

import mxmp
from bench.turns import milliseconds, timed


def main(arguments: list[str]) -> None:
    """Time an FP32 network, forward and backward, before and after its process calls tune.

    At last after an array of 300,000 values from NumPy, which starts a second OpenMP team: with OMP_NUM_THREADS=2 and
    two processors, every small operator is slower from then on. So it would be if tune measured in this process.
    """
    args = parse(main.__doc__, arguments, rounds=31)
    net = vision.mobilenet_v2_0_25(classes=10)
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    shape = (8, 3, 112, 112)
    data = mx.nd.random.uniform(shape=shape)

    def step() -> None:
        with autograd.record():
            out = net(data)
        out.backward()

    def measure(when: str) -> None:
        for _ in range(3):
            step()
        taken = [timed(step, mx.nd.waitall) for _ in range(args.rounds)]
        print(f"| {when} | {milliseconds(taken):.1f} ms | {threads()} |", flush=True)

    print("| | forward and backward | threads |\n|---|---|---|")
    measure("before tune")
    mxmp.tune(net, shape, cache=False)
    measure("after tune")
    mx.nd.array(np.zeros(300_000))
    measure("after an array from NumPy")


def threads() -> int:
    """Return the number of threads of this process, as Linux counts them."""
    return len(os.listdir("/proc/self/task"))
