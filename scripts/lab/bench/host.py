"""What a step costs on the host: engine operations and CPU time of the calling thread, beside MXNet's own Trainer.

On a GPU the device stands still while Python works between the one synchronization of a step and the next
kernel. Neither figure needs a GPU: operations are counted by MXNet's profiler, and the thread's CPU time leaves
out what the device, here the engine's threads, does meanwhile. MXNet's own is a ``gluon.Trainer`` on parameters
of the same shapes and dtypes, with ``multi_precision`` where they are float16. Medians; both take turns. On a CPU
mxmp takes large arrays one by one, which costs the host a little and saves the CPU more: ``--gpu`` leaves that out.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from functools import partial
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd, gluon
from support.options import parse
from support.pages import show
from support.profile import operators

import mxmp
from bench import turns
from bench.networks import NETWORKS
from mxmp.step import gradients

STORED = {"float16": mxmp.Policy("float16", params="float16"), "float32": mxmp.Policy("float16", params="float32")}
OPTIMIZERS = {"sgd": {"momentum": 0.9, "wd": 1e-4}, "adam": {}, "lamb": {}}


def network(name: str, *shape: int) -> tuple[gluon.Block, list]:
    return NETWORKS[name].make(), [mx.nd.ones(shape)]


NETS: dict[str, Callable[[], tuple[gluon.Block, list]]] = {
    "resnet50_v1b": partial(network, "resnet50", 1, 3, 32, 32),
    "bert_base": partial(network, "bert", 1, 8, 768),
    "lstm_lm": partial(network, "lstm", 5, 2),
}


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments),
        nets=(list(NETS), "", NETS),
        optimizers=(list(OPTIMIZERS), "", OPTIMIZERS),
        stored=(list(STORED), "dtypes of the parameters", STORED),
        rounds=9,
        gpu=(False, "push the operators that arrays on a GPU get; the values are not looked at"),
    )
    if args.gpu:
        gradients._on_gpu = lambda array: True
    cases = itertools.product(args.nets, args.optimizers, args.stored)
    show(
        "network | optimizer | stored in | parameters | operations | MXNet's | host ms | MXNet's | ratio",
        ([*case, *(round(figure, 2) for figure in measure(*case, args.rounds).values())] for case in cases),
    )


def measure(net_name: str, optimizer: str, stored: str, rounds: int) -> dict[str, float]:
    net, inputs = NETS[net_name]()
    net.initialize()
    mxmp.convert(net, STORED[stored])
    net(*inputs)
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    ours = mxmp.Trainer(net.collect_params(), optimizer, OPTIMIZERS[optimizer], loss_scale=128.0)
    plain = [twin(p) for p in params]
    options = {**OPTIMIZERS[optimizer], "multi_precision": stored == "float16"}
    theirs = gluon.Trainer(plain, optimizer, options, update_on_kvstore=False)
    steps: dict[str, Callable[[Callable], Any]] = {
        "": partial(backward_and_step, lambda: net(*inputs), ours),
        "their_": partial(backward_and_step, lambda: [p.data().astype("float32") for p in plain], theirs),
    }
    calls = {name: partial(step, partial(turns.timed, clock=time.thread_time)) for name, step in steps.items()}
    turns.take_turns(calls, 0, 2)
    found: dict[str, float] = {"parameters": len(params)}
    found.update({f"{name}ops": step(counted) for name, step in steps.items()})
    gc.collect()
    gc.disable()
    times, _ = turns.take_turns(calls, 0, rounds)
    gc.enable()
    found.update({f"{name}ms": turns.milliseconds(taken) for name, taken in times.items()})
    return {**found, "ratio": statistics.median(a / b for a, b in zip(*times.values()))}


def twin(param: gluon.Parameter) -> gluon.Parameter:
    made = gluon.Parameter(param.name, shape=param.shape, dtype=param.grad().dtype)
    made.initialize()
    return made


def backward_and_step(forward: Callable[[], Any], trainer: gluon.Trainer, around: Callable) -> Any:
    """Return what ``around`` finds out about the step; the backward before it is done."""
    with autograd.record():
        outs = forward()
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        losses = [out.mean() for out in outs if isinstance(out, mx.nd.NDArray)]  # BERT's encoder returns a list too
    if isinstance(trainer, mxmp.Trainer):
        trainer.backward(losses)
    else:
        autograd.backward(losses)
    mx.nd.waitall()
    found = around(lambda: trainer.step(1))
    mx.nd.waitall()
    return found


def counted(step: Callable[[], None]) -> int:
    """Return how many operators the engine runs."""
    return sum(count for count, _ in operators(step).values())
