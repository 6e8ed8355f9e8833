"""Counts how often a reader changes files who follows a call of mxmp as Python runs it.

    python scripts/dev.py check ways            # the two counts; fails where one has grown
    python scripts/dev.py check ways --listed   # also what is visited, in order: a guide for reading

The network is a small one: convolution, BatchNorm, ReLU, pooling, dense layer, softmax. Each function of mxmp is read
where it is called first, and lambdas and comprehensions with what contains them. A *stay* is a visit to one file, until
the next function stands in another; a *return* is a stay in a file that was left before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, NamedTuple

import mxnet as mx
from support.options import parse

import mxmp
from mxmp.pipeline import Use
from mxmp.symbolic.core import Core, Inputs

PACKAGE = Path(mxmp.__file__).parent
SHAPES: dict[str, Any] = {"data": (4, 3, 8, 8), "softmax_label": (4,)}


class Stay(NamedTuple):
    """What is read in one visit to a file of mxmp: functions in the order of their first calls."""

    file: str
    functions: list[str]
    returns: bool


def symbol() -> mx.sym.Symbol:
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=8, name="conv")
    x = mx.sym.Activation(mx.sym.BatchNorm(x, name="norm"), act_type="relu")
    x = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=4, name="fc"), name="softmax")


def low_symbol(policy: str) -> Callable[[], Any]:
    net = symbol()
    parameters = [name for name in net.list_arguments() if name not in SHAPES]
    use = Use("cpu", parameters, grad_req=dict.fromkeys(parameters, "write"), training_shapes=SHAPES)
    core = Core(policy, (), "dynamic")
    return lambda: core.low_symbol(net, use, Inputs(SHAPES, {}, None), for_training=True)


def tune(policy: str) -> Callable[[], Any]:
    return lambda: mxmp.tune(symbol(), policy=policy, measure=False, **SHAPES)


# From a name to what makes the call for a policy, and the most stays and returns.
WAYS: dict[str, tuple[Callable[[str], Callable[[], Any]], int, int]] = {
    "low_symbol": (low_symbol, 45, 35),
    "tune": (tune, 60, 45),
}

# How much longer they are in float16, for its emulation and the scaled loss head.
MORE = {"bfloat16": 0, "float16": 2}


def followed(call: Callable[[], Any]) -> list[Stay]:
    """Return the stays of a reader who follows ``call``, and runs it."""
    known: set[CodeType] = set()
    stays: list[Stay] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in known or not code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return
        known.add(code)
        if not code.co_name.startswith("<"):
            file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            if not stays or stays[-1].file != file:
                stays.append(Stay(file, [], any(stay.file == file for stay in stays)))
            stays[-1].functions.append(code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def main(arguments: list[str] | None = None) -> int:
    args = parse(
        __doc__, arguments, listed=(False, "print each stay; * is a return"), policy=("bfloat16", "", list(MORE))
    )
    longer = False
    for name, (made, most, most_returns) in WAYS.items():
        stays = followed(made(args.policy))
        if args.listed:
            for number, stay in enumerate(stays, 1):
                print(f"{number:4} {'*' if stay.returns else ' '} {stay.file:28} {' '.join(stay.functions)}")
        returns = sum(stay.returns for stay in stays)
        files = len({stay.file for stay in stays})
        most, most_returns = most + MORE[args.policy], most_returns + MORE[args.policy]
        print(f"{name}: {len(stays)} stays, {returns} returns, {files} files; at most {most} and {most_returns}")
        longer |= len(stays) > most or returns > most_returns
    return int(longer)
