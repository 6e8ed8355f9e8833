"""What mxmp.diagnose.watch costs: of a watched step, and of a run that watches every 100th.

    python scripts/bench_watch.py                                # resnet18_v1b, batch 8, 64x64, both doors
    python scripts/bench_watch.py --model resnet50_v1b --size 112 --rounds 20

One process trains; steps that are watched, steps between them with the watch on, and steps without a watch take
turns, so that a machine whose speed drifts favours none. Printed are medians: of a plain step, how much longer a
step takes while the watch is on and not due (nothing, but for the clock's noise), and a watched one, and what that
makes for one step in ``--every``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd, gluon

import mxmp
from mxmp.diagnose import watch

TARGET = 0.02
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18_v1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that others use as well")
    parser.add_argument("--doors", nargs="+", choices=("gluon", "module"), default=["gluon", "module"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"{args.model}, batch {args.batch}, {args.size}x{args.size}, float16, {args.rounds} rounds, {args.clock} time"
    )
    print(f"{'door':<8}{'plain ms':>10}{'on, not due':>14}{'watched':>12}{f'every={args.every}':>14}   target")
    for door in args.doors:
        plain, idle, watched = measure(
            *(gluon_step if door == "gluon" else module_step)(args), args.rounds, CLOCKS[args.clock]
        )
        cost = watched / args.every
        print(f"{door:<8}{plain * 1e3:>10.1f}{idle:>+14.2%}{watched:>+12.1%}{cost:>+14.2%}   < {TARGET:.0%}")


def measure(
    step: Callable[[], None], target: tuple, rounds: int, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Seconds of a plain step, and by which part of it one with the watch on takes longer, not due and due."""

    def timed() -> float:
        mx.nd.waitall()
        start = clock()
        step()
        mx.nd.waitall()
        return clock() - start

    for _ in range(3):
        timed()
    times: dict[str, list[float]] = {"plain": [], "idle": [], "watched": []}
    for round_ in range(rounds + 1):
        plain = [timed() for _ in range(3)]
        with watch(*target, every=10**9):
            watched = [timed(), timed()]  # the step after it finds the caches as that one left them
            idle = [timed() for _ in range(3)]
        if round_:  # the first one makes what it watches with
            times["plain"] += plain
            times["idle"] += idle
            times["watched"].append(sum(watched) - statistics.median(plain))
    plain_, idle_, watched_ = (statistics.median(times[name]) for name in ("plain", "idle", "watched"))
    return plain_, idle_ / plain_ - 1, watched_ / plain_ - 1


def network(args: argparse.Namespace) -> Any:
    from gluoncv.model_zoo import get_model

    mx.random.seed(0)
    net = get_model(args.model, classes=1000)
    net.initialize(mx.init.MSRAPrelu())
    return net


def gluon_step(args: argparse.Namespace) -> tuple[Callable[[], None], tuple]:
    net = mxmp.convert(network(args))
    net.hybridize(static_alloc=True, static_shape=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 1e-4, "momentum": 0.9}
    trainer = mxmp.Trainer(net.collect_params(), "sgd", options, loss_scale=16.0)
    x, y = data(args)

    def step() -> None:
        with autograd.record():
            loss = loss_fn(net(x), y)
        trainer.backward(loss)
        trainer.step(args.batch)

    return step, (net, trainer)


def module_step(args: argparse.Namespace) -> tuple[Callable[[], None], tuple]:
    symbol = mx.sym.SoftmaxOutput(network(args)(mx.sym.var("data")), name="softmax")
    module = mxmp.Module(symbol, loss_scale=16.0)
    x, y = data(args)
    module.bind([("data", x.shape)], [("softmax_label", y.shape)])
    module.init_params(mx.init.MSRAPrelu())
    module.init_optimizer(optimizer_params={"learning_rate": 1e-4, "momentum": 0.9})
    batch = mx.io.DataBatch([x], [y])

    def step() -> None:
        module.forward_backward(batch)
        module.update()

    return step, (module,)


def data(args: argparse.Namespace) -> tuple:
    x = mx.nd.random.normal(shape=(args.batch, 3, args.size, args.size))
    return x, mx.nd.array([i % 1000 for i in range(args.batch)])


if __name__ == "__main__":
    main()
