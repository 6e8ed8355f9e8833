"""What the environment of a process costs plain FP32 training on a CPU: threads, how they wait, and data workers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any, Iterator

from support.options import parse

from bench.turns import gain, milliseconds, take_turns

POLICIES = ("not set", "active", "passive")


def main(arguments: list[str] | None = None) -> None:
    """Time steps of a plain gluon.Trainer in FP32 on batches of a DataLoader, for threads, waiting and data workers.

    The data are NumPy arrays, as in most scripts: an ``mx.nd.array`` of 200,000 values or more starts a second team of
    OpenMP threads. ``waiting`` is OMP_WAIT_POLICY. Each row is a process of its own; they take turns, a few steps each.
    The first row is what the others are compared with: above 1 is faster.
    """
    args = parse(
        *(main.__doc__, arguments),
        model="mobilenetv2_0.25",
        batch=32,
        size=112,
        threads=[1, 2],
        workers=[0, 2],
        waiting=(list(POLICIES[:2]), "OMP_WAIT_POLICY", POLICIES),
        rounds=15,
    )
    cases = [
        (threads, waiting, workers)
        for threads, waiting, workers in itertools.product(args.threads, args.waiting, args.workers)
        if threads > 1 or waiting == POLICIES[0]  # one thread waits for no other
    ]
    names = {" | ".join(map(str, case)): case for case in cases}
    running = {name: Process(*case, args.model, args.batch, args.size) for name, case in names.items()}
    taken, _ = take_turns(running, 2, args.rounds)
    first = taken[next(iter(names))]
    print(f"{len(os.sched_getaffinity(0))} processors; {args.model}, {args.batch} of {args.size}\n")
    print(
        "| OMP_NUM_THREADS | OMP_WAIT_POLICY | DataLoader workers | ms a step | times as fast |\n|---|---|---|---|---|"
    )
    for name, seconds in taken.items():
        print(f"| {name} | {milliseconds(seconds):.1f} | {gain(first, seconds)} |")
        running[name].stop()


class Process:
    """A process that trains with one setting; a call lets it make some steps, and returns the seconds of one."""

    def __init__(self, threads: int, waiting: str, workers: int, *network: Any) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        environment["OMP_NUM_THREADS"] = str(threads)
        if waiting != POLICIES[0]:
            environment["OMP_WAIT_POLICY"] = waiting
        command = [sys.executable, "-m", "bench.environment", json.dumps([workers, *network])]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def __call__(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def trained(workers: int, model: str, batch: int, size: int, steps: int = 8) -> Iterator[float]:
    """Yield the seconds of a step, the mean of some, each time that the next is requested."""
    import time

    import mxnet as mx
    import numpy as np
    from gluoncv.model_zoo import get_model
    from mxnet import autograd, gluon

    images = np.random.RandomState(0).normal(size=(64, 3, size, size)).astype("float32")
    dataset = gluon.data.SimpleDataset([(image, number % 10) for number, image in enumerate(images)])
    data = gluon.data.DataLoader(dataset, batch, num_workers=workers)
    net = get_model(model, classes=10)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    while True:
        start = time.perf_counter()
        for x, y in itertools.islice(batches, steps):
            with autograd.record():
                cost = loss(net(x.as_in_context(mx.cpu())), y.as_in_context(mx.cpu()))
            cost.backward()
            trainer.step(batch)
            cost.wait_to_read()
        mx.nd.waitall()
        yield (time.perf_counter() - start) / steps


if __name__ == "__main__":
    taken = trained(*json.loads(sys.argv[1]))
    while sys.stdin.readline():
        print(next(taken), flush=True)
