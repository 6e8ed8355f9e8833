"""What mxmp.Trainer costs beyond a plain gluon.Trainer: scaling, the finite check, bookkeeping.

    python scripts/bench_trainer.py                                # resnet50_v1b, batch 16, 112x112
    python scripts/bench_trainer.py --dtypes bfloat16 --rounds 40

Both trainers update the same converted net in the same process and take turns, one step each, in an
order that alternates, so that a machine whose speed drifts favours none. Both run the optimizer's
kernels one weight at a time, so that no choice of kernels is measured. Printed, as medians with quartiles taken
round by round: ``ours / plain - 1`` of whole steps, and, less noisy, what ``step`` and the set-up of
``backward`` take longer than plain ones, with the device idle before and after, in parts of a whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from typing import Callable

os.environ["MXNET_OPTIMIZER_AGGREGATION_SIZE"] = "1"

import mxnet as mx
from bench.turns import quartiles
from mxnet import autograd, gluon

import mxmp
from mxmp.gluon.record import Record
from mxmp.gluon.sharing import scaled_backward

TARGETS = {"float16": 0.01, "bfloat16": 0.03}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50_v1b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--dtypes", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{args.model}, batch {args.batch}, {args.size}x{args.size}, {args.optimizer}, {args.rounds} rounds")
    print(f"{'dtype':<10}{'plain ms':>10}{'mxmp ms':>10}   {'whole steps':<32}{'step() and set-up':<32}target")
    figures = {dtype: measure(dtype, args) for dtype in args.dtypes}
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "figures": figures}, file, indent=1)


def measure(dtype: str, args: argparse.Namespace) -> dict:
    steps = make_steps(dtype, args)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(args.warmup + args.rounds):
        for name in sorted(steps, reverse=round_ % 2 == 1):
            taken = steps[name]()
            if round_ >= args.warmup:
                times[name].append(taken)
    pairs = list(zip(times["mxmp"], times["plain"]))
    whole = quartiles([ours[0] / plain[0] - 1 for ours, plain in pairs])
    plain_ms, ours_ms = (statistics.median(t[0] for t in times[name]) * 1e3 for name in ("plain", "mxmp"))
    trainer = quartiles([(ours[1] - plain[1]) * 1e3 / plain_ms for ours, plain in pairs])
    print(f"{dtype:<10}{plain_ms:>10.1f}{ours_ms:>10.1f}   {text(whole)}{text(trainer)}<= {TARGETS[dtype]:.0%}")
    return {"plain_ms": plain_ms, "mxmp_ms": ours_ms, "whole": whole, "trainer": trainer}


def text(found: list[float]) -> str:
    return f"{found[1]:+.2%} ({found[0]:+.2%} to {found[2]:+.2%})".ljust(32)


def make_steps(dtype: str, args: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float]]]:
    """By trainer, a function that trains one step: seconds of all of it, and of what the trainer does."""
    from gluoncv.model_zoo import get_model

    mx.random.seed(0)
    net = get_model(args.model, classes=1000)
    net.initialize(mx.init.MSRAPrelu())
    mxmp.convert(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 1e-4, **({"momentum": 0.9} if args.optimizer == "sgd" else {})}
    plain = gluon.Trainer(net.collect_params(), args.optimizer, options)
    scale = mxmp.DynamicLossScaler(init_scale=16.0) if dtype == "float16" else "dynamic"  # no skips: data is noise
    ours = mxmp.Trainer(net.collect_params(), args.optimizer, options, loss_scale=scale)
    x = mx.nd.random.normal(shape=(args.batch, 3, args.size, args.size))
    y = mx.nd.array([i % 1000 for i in range(args.batch)])

    def step(trainer: gluon.Trainer) -> tuple[float, float]:
        start = time.perf_counter()
        with autograd.record():
            loss = loss_fn(net(x), y)
        mx.nd.waitall()
        setup = -time.perf_counter()
        if trainer is ours:
            with scaled_backward(ours, Record([loss])):
                pass
            mx.nd.waitall()
            setup += time.perf_counter()
            ours.backward(loss)
        else:
            setup = 0.0
            loss.backward()
        mx.nd.waitall()
        update = time.perf_counter()
        trainer.step(args.batch)
        mx.nd.waitall()
        end = time.perf_counter()
        assert trainer is plain or not ours.last_step_skipped
        return end - start, end - update + setup

    return {"plain": lambda: step(plain), "mxmp": lambda: step(ours)}


if __name__ == "__main__":
    main()
