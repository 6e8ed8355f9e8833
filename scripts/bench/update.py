"""The check of FP32 gradients and SGD's update on a CPU: MXNet's operators for many arrays, and mxmp's choice of them.

    python scripts/bench_update.py
    python scripts/bench_update.py mobilenetv2_1.0 --rounds 20

``multi_sum_sq`` over all gradients against ``FiniteSums``; MXNet's Updater, which hands arrays to
``multi_sgd_mom_update`` four at a time, against ours. Both take turns on arrays of the network's shapes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any, Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxnet as mx
from gluoncv.model_zoo import get_model

from bench.turns import call_in_turns, gain
from mxmp.step.gradients import FiniteSums, Gradient
from mxmp.step.updater import Updater

SGD: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["alexnet", "vgg16", "resnet50_v1b"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("| network | check: MXNet's ms | mxmp's | ratio | update: MXNet's ms | mxmp's | ratio |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        weights = arrays_of(model)
        grads = [weight * 1e-3 for weight in weights]
        print(f"| {model} | {check(grads, args.rounds)} | {update(weights, grads, args.rounds)} |", flush=True)


def arrays_of(model: str) -> list[mx.nd.NDArray]:
    """The network's parameters."""
    net = get_model(model, pretrained=False)
    net.initialize()
    net(mx.nd.ones((1, 3, 224, 224)))
    return [p.data() for p in net.collect_params().values() if p.grad_req != "null"]


def check(grads: list, rounds: int) -> str:
    ours = FiniteSums([Gradient(str(i), grad) for i, grad in enumerate(grads)])
    return compared(lambda: mx.nd.multi_sum_sq(*grads, num_arrays=len(grads)), ours, rounds)


def update(weights: list, grads: list, rounds: int) -> str:
    indices = list(range(len(grads)))
    theirs = mx.optimizer.Updater(mx.optimizer.SGD(**SGD))
    ours, copies = Updater(mx.optimizer.SGD(**SGD), lambda index: None), [weight.copy() for weight in weights]
    return compared(lambda: theirs(indices, grads, weights), lambda: ours(indices, grads, copies), rounds)


def compared(theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> str:
    """Cells of a row: the medians, and the ratio theirs / ours."""

    def done(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            mx.nd.waitall()

        return run

    mx.nd.waitall()
    taken = call_in_turns([done(theirs), done(ours)], rounds)
    first, second = (statistics.median(each) * 1e3 for each in taken)
    return f"{first:.1f} | {second:.1f} | {gain(*taken)}"


if __name__ == "__main__":
    main()
