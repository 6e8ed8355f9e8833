"""Host times of training by this tree of mxmp and by another one, in turns: the first call, and what a step takes.

    git worktree add ../before COMMIT
    python scripts/dev.py bench trees ../before

Each process imports one of the two trees, and uses public names only. Times are CPU times of the calling thread, which
leave out what the device does meanwhile; networks are at sizes at which it does little. ``first call``: of a converted
net, with its gradient graph. Medians of ratios, and their range over the rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import autograd
from support.options import parse
from support.pages import show
from support.results import ROOT
from support.trees import environment_of, other_tree

from bench.networks import NETWORKS

SHAPES = {"resnet50": (1, 3, 32, 32), "mobilenetv2": (1, 3, 32, 32), "bert": (8, 1, 768)}
PARTS = ("first call", "forward", "backward", "step")
STEPS, WARMUP = 25, 3


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "before"),
        before=([str], "the other tree's folder"),
        nets=(list(SHAPES), "", SHAPES),
        policies=(["float16", "bfloat16"], ""),
        rounds=5,
    )
    other = other_tree(args.before)
    show(
        "network | policy | | before, ms | now, ms | now / before",
        (row for name in args.nets for policy in args.policies for row in rows(other, args.rounds, name, policy)),
    )


def rows(other: Path, rounds: int, name: str, policy: str) -> Iterator[list[str]]:
    found = [[apart(tree, name, policy) for tree in (other, ROOT)] for _ in range(rounds)]
    for part in PARTS:
        pairs = [(before[part], now[part]) for before, now in found]
        ratios = sorted(now / before for before, now in pairs)
        times = [f"{1e3 * median(each):.2f}" for each in zip(*pairs)]
        yield [name, policy, part, *times, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]


def apart(tree: Path, name: str, policy: str) -> dict[str, float]:
    """Return the seconds of each part in a process of its own, by the mxmp in ``tree``."""
    command = [sys.executable, "-W", "ignore", __file__, name, policy]
    done = subprocess.run(command, env=environment_of(tree), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}, {name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, policy: str) -> dict[str, float]:
    import mxmp  # of the tree that PYTHONPATH names first

    net, x = NETWORKS[name].make(), mx.nd.ones(SHAPES[name])
    net.initialize(mx.init.Xavier())
    net(x)  # in FP32, so that all Parameters have their shapes
    mxmp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4, "momentum": 0.9})

    def forward() -> mx.nd.NDArray:
        with autograd.record():
            out = net(x)
            return ((out[0] if isinstance(out, (list, tuple)) else out) ** 2).sum()

    found: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = call()
        found[part].append(time.thread_time() - start)
        return result

    timed("first call", lambda: trainer.backward(forward()))
    for number in range(WARMUP + STEPS):
        loss = timed("forward", forward)
        timed("backward", partial(trainer.backward, loss))
        mx.nd.waitall()
        timed("step", partial(trainer.step, 1))
        mx.nd.waitall()
        if number < WARMUP:
            found = {**found, **{part: [] for part in PARTS[1:]}}
    return {part: median(times) for part, times in found.items()}


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
