"""What the environment of a process costs plain FP32 training on a CPU: threads, how they wait, and data workers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from support.options import parse
from support.pages import show

from bench.turns import gain, milliseconds, take_turns

POLICIES = ("not set", "active", "passive")
WARMUP, STEPS = 8, 24


def main(arguments: list[str] | None = None) -> None:
    """Time steps of a plain gluon.Trainer in FP32 on batches of a DataLoader, for threads, waiting and data workers.

    The data are NumPy arrays, as in most scripts: an ``mx.nd.array`` of 200,000 values or more starts a second team of
    OpenMP threads. ``waiting`` is OMP_WAIT_POLICY. The rows take turns; each turn is a process of its own, alone on the
    machine, since threads that wait actively take a processor from others. The first row is what the others are
    compared with: above 1 is faster.
    """
    args = parse(
        *(main.__doc__, arguments),
        model="mobilenetv2_0.25",
        batch=32,
        size=112,
        threads=[1, 2],
        workers=[0, 1, 2],
        waiting=(list(POLICIES[:2]), "OMP_WAIT_POLICY", POLICIES),
        rounds=3,
    )
    cases = [
        (threads, waiting, workers)
        for threads, waiting, workers in itertools.product(args.threads, args.waiting, args.workers)
        if threads > 1 or waiting == POLICIES[0]  # one thread waits for no other
    ]
    network = args.model, args.batch, args.size
    calls = {" | ".join(map(str, case)): partial(a_process, *case, *network) for case in cases}
    taken, _ = take_turns(calls, 0, args.rounds)
    first = next(iter(taken.values()))
    print(f"{len(os.sched_getaffinity(0))} processors; {args.model}, {args.batch} of {args.size}\n")
    show(
        "OMP_NUM_THREADS | OMP_WAIT_POLICY | DataLoader workers | ms a step | times as fast",
        ([name, f"{milliseconds(each):.1f}", gain(first, each)] for name, each in taken.items()),
    )


def a_process(threads: int, waiting: str, workers: int, *network: Any) -> float:
    """Return the mean seconds of a step in a new process with these settings."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment.update(OMP_NUM_THREADS=str(threads), PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    if waiting != POLICIES[0]:
        environment["OMP_WAIT_POLICY"] = waiting
    command = [sys.executable, "-W", "ignore", "-m", "bench.environment", json.dumps([workers, *network])]
    return float(subprocess.check_output(command, env=environment, text=True).splitlines()[-1])


def trained(workers: int, model: str, batch: int, size: int) -> float:
    """Train on the batches of a DataLoader; return the mean seconds of a step after the first ones."""

    from gluoncv.model_zoo import get_model

    images = np.random.RandomState(0).normal(size=(64, 3, size, size)).astype("float32")
    dataset = gluon.data.SimpleDataset([(image, number % 10) for number, image in enumerate(images)])
    data = gluon.data.DataLoader(dataset, batch, num_workers=workers)
    net = get_model(model, classes=10)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    for number, (x, y) in enumerate(itertools.islice(batches, WARMUP + STEPS)):
        if number == WARMUP:
            start = time.perf_counter()
        with autograd.record():
            cost = loss(net(x.as_in_context(mx.cpu())), y.as_in_context(mx.cpu()))
        cost.backward()
        trainer.step(batch)
        cost.wait_to_read()
    mx.nd.waitall()
    return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    print(trained(*json.loads(sys.argv[1])))
