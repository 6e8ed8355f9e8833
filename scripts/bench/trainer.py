"""What mxmp adds to a training step: its Trainer beside a plain one, and ``mxmp.diagnose.watch``."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from functools import partial
from itertools import chain
from typing import Any, Callable
from unittest import mock

import mxnet as mx
from mxnet import autograd, gluon
from support.options import parse

import mxmp
from bench import networks
from bench.host import backward_and_step
from bench.turns import gain, milliseconds, quartiles, take_turns, timed
from bench.worker import initialized
from mxmp.diagnose import watch

DTYPES = ("float16", "bfloat16")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def trainer(arguments: list[str]) -> None:
    """Time mxmp.Trainer against a plain gluon.Trainer: scaling, the finite check, bookkeeping.

    Both update the same converted net and run the optimizer's kernels one weight at a time, so that no choice of
    kernels is measured. Printed, as medians with quartiles: how much longer whole steps take, and, less noisy, what
    ``step`` and the set-up of ``backward`` take longer, with the device idle around them, in parts of a whole step.
    """
    network = {"model": "resnet50_v1b", "batch": 16, "size": 112, "rounds": 20, "warmup": 2, "optimizer": "sgd"}
    args = parse(trainer.__doc__, arguments, **network, dtypes=(list(DTYPES), "", DTYPES))
    os.environ["MXNET_OPTIMIZER_AGGREGATION_SIZE"] = "1"
    print(f"{args.model}, batch {args.batch}, {args.size}x{args.size}, {args.optimizer}, {args.rounds} rounds")
    print("| dtype | plain | mxmp | whole steps | step() and set-up |\n|---|---|---|---|---|")
    for dtype in args.dtypes:
        taken = take_turns(steps_of(dtype, args), args.warmup, args.rounds)[0]
        plain, ours = zip(*((a, b) for a, b in zip(*taken.values()) if b is not None))
        ms = [milliseconds(whole for whole, _ in each) for each in (plain, ours)]
        longer = [a / b - 1 for (a, _), (b, _) in zip(ours, plain)]
        parts = [(a - b) * 1e3 / ms[0] for (_, a), (_, b) in zip(ours, plain)]
        print(f"| {dtype} | {ms[0]:.1f} ms | {ms[1]:.1f} ms | {percent(longer)} | {percent(parts)} |", flush=True)


UPDATED = ("resnet50", "mobilenetv3_small", "se_resnet50_v1", "densenet121", "bert")
OPTIMIZERS = {
    "sgd": {"learning_rate": 1e-5, "momentum": 0.9},
    "adam": {"learning_rate": 1e-6},
    "lamb": {"learning_rate": 1e-6},
}


def updates(arguments: list[str]) -> None:
    """Time ``step`` of mxmp.Trainer, in bfloat16, and of gluon.Trainer, in FP32, each with its own choice of kernels.

    The device is idle before and after. Printed: the medians, and the one of mxmp over that of Gluon, with quartiles.
    """
    chosen = {"networks": ([str], f"as of bench models (default: {' '.join(UPDATED)})")}
    chosen["optimizers"] = (list(OPTIMIZERS), "", OPTIMIZERS)
    args = parse(*(updates.__doc__, arguments, "networks"), **chosen, rounds=12)
    print("| network | optimizer | gluon.Trainer | mxmp.Trainer | mxmp / Gluon |\n|---|---|---|---|---|")
    for name in args.networks or UPDATED:
        for optimizer in args.optimizers:
            calls = {kind: update_of(networks.network(name), optimizer, kind) for kind in ("gluon", "mxmp")}
            taken = take_turns(calls, 2, args.rounds)[0]
            times = [f"{milliseconds(each):.1f} ms" for each in taken.values()]
            print(f"| {name} | {optimizer} | {' | '.join(times)} | {gain(taken['mxmp'], taken['gluon'])} |", flush=True)


def update_of(chosen: networks.Network, optimizer: str, kind: str) -> Callable[[], float | None]:
    net, inputs = initialized(chosen), chosen.inputs(chosen.batch, chosen.size)
    if kind == "mxmp":
        mxmp.convert(net, "bfloat16")
    net.hybridize(static_alloc=True, static_shape=True)
    with autograd.record():
        net(*inputs)
    maker = mxmp.Trainer if kind == "mxmp" else gluon.Trainer
    trainer = maker(net.collect_params(), optimizer, OPTIMIZERS[optimizer])

    return partial(
        *(backward_and_step, lambda: chosen.loss(net(*inputs), chosen.batch), trainer),
        partial(timed, wait=mx.nd.waitall),
    )


def percent(found: list[float]) -> str:
    low, middle, high = quartiles(found)
    return f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"


def steps_of(dtype: str, args: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float] | None]]:
    """Return by trainer a function that trains one step: seconds of all of it, and of what the trainer does.

    None of a step that the loss scaler skipped, which took less time for it.
    """
    net, loss_of = prepared(args, dtype)
    options = {"learning_rate": 1e-4, **({"momentum": 0.9} if args.optimizer == "sgd" else {})}
    plain = gluon.Trainer(net.collect_params(), args.optimizer, options)
    scale = mxmp.DynamicLossScaler(init_scale=16.0) if dtype == "float16" else "dynamic"  # no skips: data is noise
    ours = mxmp.Trainer(net.collect_params(), args.optimizer, options, loss_scale=scale)

    def step(trainer: gluon.Trainer) -> tuple[float, float] | None:
        start, loss = time.perf_counter(), loss_of()
        mx.nd.waitall()
        setup = around_autograd(lambda: ours.backward(loss)) if trainer is ours else loss.backward() or 0.0
        update = timed(lambda: trainer.step(args.batch), mx.nd.waitall)
        skipped = trainer is ours and ours.last_step_skipped
        return None if skipped else (time.perf_counter() - start, setup + update)

    return {"plain": lambda: step(plain), "mxmp": lambda: step(ours)}


def prepared(args: argparse.Namespace, dtype: str) -> tuple[gluon.HybridBlock, Callable[[], mx.nd.NDArray]]:
    """Return a converted network, and a function that records its loss."""
    net = network(args)
    mxmp.convert(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    x, y = data(args)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def loss() -> mx.nd.NDArray:
        with autograd.record():
            return loss_fn(net(x), y)

    return net, loss


def around_autograd(backward: Callable[[], None]) -> float:
    """Return the seconds that ``backward`` takes before and behind ``mx.autograd.backward``."""
    within, original = [], autograd.backward
    with mock.patch.object(autograd, "backward", lambda *a, **k: within.append(timed(lambda: original(*a, **k)))):
        return timed(backward) - sum(within)


def backward(arguments: list[str]) -> None:
    """Time trainer.backward against loss.backward, in a process with many live Python objects."""
    args = parse(
        *(backward.__doc__, arguments),
        net=("dense", "", ("dense", "resnet50_v1")),
        objects=(1_000_000, "live lists, each with an element"),
        rounds=200,
        collect=(False, "collect garbage before each backward"),
    )
    dense = args.net == "dense"
    net = gluon.nn.Dense(8, in_units=16) if dense else gluon.model_zoo.vision.resnet50_v1()
    net.initialize()
    mxmp.convert(net, "float16")
    net.hybridize()
    loss_fn, x = gluon.loss.L2Loss(), mx.nd.ones((4, 16) if dense else (1, 3, 32, 32))
    loss_fn.hybridize()
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, loss_scale=16.0)
    alive = [[i] for i in range(args.objects)]

    def step(ours: bool) -> float | None:
        if args.collect:
            gc.collect()
        with autograd.record():
            out = net(x)
            loss = loss_fn(out, mx.nd.zeros_like(out))
        taken = timed(lambda: trainer.backward(loss) if ours else loss.backward(), mx.nd.waitall)
        if ours:
            trainer.step(1)
        return taken

    times = take_turns({"plain": lambda: step(False), "mxmp": lambda: step(True)}, 5, args.rounds)[0]
    more = [b - a for a, b in zip(*times.values())]
    ms = " | ".join(f"{milliseconds(each):.3f} ms" for each in (*times.values(), more))
    print("| net | live objects | loss.backward | trainer.backward | difference |\n|---|---|---|---|---|")
    print(f"| {args.net} | {len(alive):,} | {ms} |")


def watching(arguments: list[str]) -> None:
    """Time plain steps, steps while a watch is on and not due, and watched ones, through both frontends in float16.

    ``watched`` is what a watched step and the one behind it take longer than plain ones: that one finds the caches as
    the watched one left them.
    """
    args = parse(
        *(watching.__doc__, arguments),
        model="resnet18_v1b",
        batch=8,
        size=64,
        rounds=10,
        every=100,
        clock=("wall", "cpu: on a machine that others use as well", CLOCKS),
        frontends=(["gluon", "module"], "", ("gluon", "module")),
    )
    print(f"{args.model}, batch {args.batch}, {args.size}x{args.size}, {args.rounds} rounds, {args.clock} time")
    print(f"| frontend | plain | on, not due | watched | every={args.every} |\n|---|---|---|---|---|")
    for frontend in args.frontends:
        step, target = (gluon_step if frontend == "gluon" else module_step)(args)
        rounds = take_turns({"": phases(step, target, CLOCKS[args.clock])}, 1, args.rounds)[0][""]
        plain, idle, watched = (statistics.median(chain(*times)) for times in zip(*rounds))
        rest = f"{idle / plain - 1:+.2%} | {watched / plain - 2:+.1%} | {(watched / plain - 2) / args.every:+.2%}"
        print(f"| {frontend} | {plain * 1e3:.1f} ms | {rest} |", flush=True)


def phases(step: Callable[[], None], target: tuple, clock: Callable[[], float]) -> Callable[[], tuple]:
    """Return a function that gives the seconds of plain steps, idle ones, and a watched one with that behind it."""

    def times(count: int) -> list[float]:
        return [timed(step, mx.nd.waitall, clock) for _ in range(count)]

    def round_() -> tuple:
        plain = times(3)
        with watch(*target, every=10**9):
            watched = [sum(times(2))]
            return plain, times(3), watched

    return round_


def network(args: argparse.Namespace) -> Any:
    from gluoncv.model_zoo import get_model

    mx.random.seed(0)
    net = get_model(args.model, classes=1000)
    net.initialize(mx.init.MSRAPrelu())
    return net


def data(args: argparse.Namespace) -> tuple:
    x = mx.nd.random.normal(shape=(args.batch, 3, args.size, args.size))
    return x, mx.nd.array([i % 1000 for i in range(args.batch)])


def gluon_step(args: argparse.Namespace) -> tuple[Callable[[], None], tuple]:
    net, loss_of = prepared(args, "float16")
    options = {"learning_rate": 1e-4, "momentum": 0.9}
    trainer = mxmp.Trainer(net.collect_params(), "sgd", options, loss_scale=16.0)

    def step() -> None:
        trainer.backward(loss_of())
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
