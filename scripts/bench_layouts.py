"""Layouts of oneDNN in which BatchNorm and depthwise convolutions are slow in bfloat16, and what mxmp does about it.

    python scripts/bench_layouts.py

One block each, forward and backward: a pointwise, a grouped and a pointwise convolution, the first two with BatchNorm
and relu behind them. Variants take turns. "as it comes": everything low, and no copies around grouped convolutions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from typing import Callable
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxnet as mx
from bench.turns import call_in_turns, gain

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.precision import missing_kernels

S = mx.sym
# Channels and groups: ResNeXt's first stages and others with 12 and 24 channels a group; MobileNet's; blocks of 16.
BLOCKS = [(128, 32), (256, 32), (384, 32), (768, 32), (24, 24), (72, 72), (120, 120), (240, 240), (144, 144), (512, 32)]
BATCH, SIZE, OUTER = 8, 28, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{BATCH}x{OUTER}x{SIZE}x{SIZE}; FP32's time divided by the variant's, with quartiles")
    print("| channels | groups | FP32, ms | bfloat16 as it comes | by mxmp |\n|---|---|---|---|---|")
    for channels, groups in BLOCKS:
        symbol = block(channels, groups)
        slow = mock.patch.object(missing_kernels, "CHANNEL_BLOCK", 1)
        with slow, mock.patch.dict(os.environ, {SWITCH: "small_channel_blocks"}):
            as_it_comes = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
        by_mxmp = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
        taken = call_in_turns([step_of(each) for each in (symbol, as_it_comes, by_mxmp)], args.rounds)
        full = statistics.median(taken[0]) * 1e3
        print(f"| {channels} | {groups} | {full:.1f} | {gain(taken[0], taken[1])} | {gain(taken[0], taken[2])} |")


def block(channels: int, groups: int) -> mx.sym.Symbol:
    def layer(x: mx.sym.Symbol, number: int, size: int, filters: int, groups: int) -> mx.sym.Symbol:
        shape = {"kernel": (size, size), "pad": (size // 2, size // 2), "num_filter": filters, "num_group": groups}
        return S.Convolution(x, name=f"conv{number}", no_bias=True, **shape)

    def norm(x: mx.sym.Symbol, number: int) -> mx.sym.Symbol:
        return S.Activation(S.BatchNorm(x, name=f"norm{number}", fix_gamma=False), act_type="relu")

    x = norm(layer(S.var("data"), 1, 1, channels, 1), 1)
    return layer(norm(layer(x, 2, 3, channels, groups), 2), 3, 1, OUTER, 1)


def step_of(symbol: mx.sym.Symbol) -> Callable[[], None]:
    executor = symbol.simple_bind(mx.cpu(), data=(BATCH, OUTER, SIZE, SIZE))
    for name, array in executor.arg_dict.items():
        array[:] = mx.nd.random.normal(shape=array.shape) * (1 if name == "data" else 0.1)
    grad = mx.nd.random.normal(shape=executor.outputs[0].shape)

    def step() -> None:
        executor.forward(is_train=True)
        executor.backward(grad)
        mx.nd.waitall()

    return step


if __name__ == "__main__":
    main()
