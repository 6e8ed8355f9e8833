"""What mxmp adds to a training step: ``step`` of its Trainer beside a plain one, and ``mxmp.diagnose.watch``."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from functools import partial
from itertools import chain
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import autograd, gluon
from support.options import parse
from support.pages import show

import mxmp
from bench import networks
from bench.host import backward_and_step
from bench.turns import gain, milliseconds, take_turns, timed
from bench.worker import initialized
from mxmp.diagnose import watch

SGD = {"learning_rate": 1e-4, "momentum": 0.9}


def prepared(name: str, dtype: str | None, batch: int = 0, size: int = 0) -> tuple[gluon.HybridBlock, Callable]:
    """Return a network, converted to a dtype if there is one, and a function that records its loss."""
    chosen = networks.network(name)
    batch, size = batch or chosen.batch, size or chosen.size
    net, inputs = initialized(chosen), chosen.inputs(batch, size)
    if dtype:
        mxmp.convert(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)

    def loss() -> mx.nd.NDArray:
        with autograd.record():
            return chosen.loss(net(*inputs), batch)

    loss()  # shapes of the parameters
    return net, loss


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

    def rows() -> Iterator[list[str]]:
        for name in args.networks or UPDATED:
            for optimizer in args.optimizers:
                calls = {kind: update_of(name, optimizer, kind) for kind in ("gluon", "mxmp")}
                taken = take_turns(calls, 2, args.rounds)[0]
                times = [f"{milliseconds(each):.1f} ms" for each in taken.values()]
                yield [name, optimizer, *times, gain(taken["mxmp"], taken["gluon"])]

    show("network | optimizer | gluon.Trainer | mxmp.Trainer | mxmp / Gluon", rows())


def update_of(name: str, optimizer: str, kind: str) -> Callable[[], float | None]:
    net, loss_of = prepared(name, "bfloat16" if kind == "mxmp" else None)
    maker = mxmp.Trainer if kind == "mxmp" else gluon.Trainer
    trainer = maker(net.collect_params(), optimizer, OPTIMIZERS[optimizer])
    return partial(backward_and_step, loss_of, trainer, partial(timed, wait=mx.nd.waitall))


def watching(arguments: list[str]) -> None:
    """Time plain steps, steps while a watch is on and not due, and watched ones, through both frontends in float16.

    In time of the processors, so that other processes matter less. ``watched`` is what a watched step and the one
    behind it take longer than plain ones: that one finds the caches as the watched one left them.
    """
    sizes: dict[str, Any] = {"model": "resnet18_v1b", "batch": 8, "size": 64}
    args = parse(*(watching.__doc__, arguments), **sizes, rounds=10, every=100)

    def rows() -> Iterator[list[str]]:
        for frontend, made in (("gluon", gluon_step), ("module", module_step)):
            rounds = take_turns({"": phases(*made(args))}, 1, args.rounds)[0][""]
            plain, idle, watched = (statistics.median(chain(*times)) for times in zip(*rounds))
            more = watched / plain - 2
            yield [
                frontend,
                f"{plain * 1e3:.1f} ms",
                f"{idle / plain - 1:+.2%}",
                f"{more:+.1%}",
                f"{more / args.every:+.2%}",
            ]

    print(f"{args.model}, batch {args.batch}, {args.size}x{args.size}, {args.rounds} rounds")
    show(f"frontend | plain | on, not due | watched | every={args.every}", rows())


def phases(step: Callable[[], None], target: tuple) -> Callable[[], tuple]:
    """Return a function that gives the seconds of plain steps, idle ones, and a watched one with that behind it."""

    def times(count: int) -> list[float | None]:
        return [timed(step, mx.nd.waitall, time.process_time) for _ in range(count)]

    def round_() -> tuple:
        plain = times(3)
        with watch(*target, every=10**9):
            watched = [sum(filter(None, times(2)))]
            return plain, times(3), watched

    return round_


def gluon_step(args: Namespace) -> tuple[Callable[[], None], tuple]:
    net, loss_of = prepared(args.model, "float16", args.batch, args.size)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=16.0)

    def step() -> None:
        trainer.backward(loss_of())
        trainer.step(args.batch)

    return step, (net, trainer)


def module_step(args: Namespace) -> tuple[Callable[[], None], tuple]:
    chosen = networks.network(args.model)
    module = mxmp.Module(mx.sym.SoftmaxOutput(chosen.make()(mx.sym.var("data")), name="softmax"), loss_scale=16.0)
    batch = mx.io.DataBatch(chosen.inputs(args.batch, args.size), [mx.nd.arange(args.batch)])
    module.bind([("data", batch.data[0].shape)], [("softmax_label", batch.label[0].shape)])
    module.init_params(mx.init.MSRAPrelu())
    module.init_optimizer(optimizer_params=SGD)

    def step() -> None:
        module.forward_backward(batch)
        module.update()

    return step, (module,)
