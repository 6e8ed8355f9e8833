"""What trainer.backward takes longer than loss.backward, in a process with many live Python objects.

    python scripts/bench_backward.py
    python scripts/bench_backward.py --objects 0 --net resnet50_v1 --collect

A small Dense net and a hybridized loss by default; both backwards take turns, and gradients are waited for after
each. Printed are medians of milliseconds, and the median of the differences taken round by round. ``--collect``
runs Python's garbage collector before each pair.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxnet as mx
from mxnet import autograd, gluon

import mxmp


def small() -> tuple[gluon.Block, tuple]:
    return gluon.nn.Dense(8, in_units=16), (4, 16)


def resnet() -> tuple[gluon.Block, tuple]:
    return gluon.model_zoo.vision.resnet50_v1(), (1, 3, 32, 32)


NETS = {"dense": small, "resnet50_v1": resnet}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="dense")
    parser.add_argument("--objects", type=int, default=1_000_000, help="live lists, each with an element")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--collect", action="store_true", help="collect garbage before each round")
    args = parser.parse_args()
    net, shape = NETS[args.net]()
    net.initialize()
    mxmp.convert(net, "float16")
    net.hybridize()
    loss_fn = gluon.loss.L2Loss()
    loss_fn.hybridize()
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, loss_scale=16.0)
    x = mx.nd.ones(shape)
    alive = [[i] for i in range(args.objects)]

    def timed(scaled: bool) -> float:
        with autograd.record():
            out = net(x)
            loss = loss_fn(out, mx.nd.zeros_like(out))
        mx.nd.waitall()
        start = time.perf_counter()
        if scaled:
            trainer.backward(loss)
        else:
            loss.backward()
        mx.nd.waitall()
        taken = (time.perf_counter() - start) * 1e3
        if scaled:
            trainer.step(1)
        return taken

    pairs = []
    for round_ in range(args.rounds + 5):
        if args.collect:
            gc.collect()
        order = (True, False) if round_ % 2 else (False, True)
        taken = {scaled: timed(scaled) for scaled in order}
        pairs.append((taken[True], taken[False]))
    pairs = pairs[5:]
    ours, plain = (statistics.median(column) for column in zip(*pairs))
    more = statistics.median(a - b for a, b in pairs)
    print(f"{args.net}, {len(alive):,} live objects, {args.rounds} rounds")
    print(f"trainer.backward {ours:.3f} ms, loss.backward {plain:.3f} ms, difference {more:.3f} ms")


if __name__ == "__main__":
    main()
