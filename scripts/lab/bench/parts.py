"""Parts of a step, each alone: slow layouts, products of few rows, and the update."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Dict, Iterator
from unittest import mock

import mxnet as mx
from mxnet import autograd, gluon
from support.options import parse

import mxmp
from bench.turns import bench
from mxmp.kernels.fit import SWITCH
from mxmp.precision import missing_kernels
from mxmp.step.gradients import FiniteSums, Gradient
from mxmp.step.updater import Updater

S = mx.sym
Steps = Dict[str, Callable[[], Any]]


# Channels and groups: ResNeXt's first stages and others with 12 and 24 channels a group; MobileNet's; blocks of 16.
BLOCKS = [(128, 32), (256, 32), (384, 32), (768, 32), (24, 24), (72, 72), (120, 120), (144, 144), (512, 32)]
BATCH, SIZE, OUTER = 8, 28, 64


def layouts(arguments: list[str]) -> None:
    """Time blocks, forward and backward, in FP32, in bfloat16 as it comes, and as mxmp makes it.

    As it comes: everything low, and no copies around grouped convolutions. A block is a pointwise, a grouped and a
    pointwise convolution, the first two with BatchNorm and relu behind them.
    """
    args = parse(layouts.__doc__, arguments, rounds=11)

    def rows() -> Iterator[tuple[tuple[int, int], Steps]]:
        for channels, groups in BLOCKS:
            symbol = block(channels, groups)
            slow = mock.patch.object(missing_kernels, "CHANNEL_BLOCK", 1)
            with slow, mock.patch.dict(os.environ, {SWITCH: "small_channel_blocks"}):
                as_it_comes = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
            by_mxmp = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
            symbols = {"FP32": symbol, "bfloat16 as it comes": as_it_comes, "by mxmp": by_mxmp}
            yield (channels, groups), {name: executed(each) for name, each in symbols.items()}

    bench("channels | groups", rows(), args.rounds)


def block(channels: int, groups: int) -> mx.sym.Symbol:
    def layer(x: mx.sym.Symbol, number: int, size: int, filters: int, groups: int) -> mx.sym.Symbol:
        shape = {"kernel": (size, size), "pad": (size // 2, size // 2), "num_filter": filters, "num_group": groups}
        return S.Convolution(x, name=f"conv{number}", no_bias=True, **shape)

    def norm(x: mx.sym.Symbol, number: int) -> mx.sym.Symbol:
        return S.Activation(S.BatchNorm(x, name=f"norm{number}", fix_gamma=False), act_type="relu")

    x = norm(layer(S.var("data"), 1, 1, channels, 1), 1)
    return layer(norm(layer(x, 2, 3, channels, groups), 2), 3, 1, OUTER, 1)


def executed(symbol: mx.sym.Symbol) -> Callable[[], None]:
    executor = symbol.simple_bind(mx.cpu(), data=(BATCH, OUTER, SIZE, SIZE))
    for name, array in executor.arg_dict.items():
        array[:] = mx.nd.random.normal(shape=array.shape) * (1 if name == "data" else 0.1)
    grad = mx.nd.random.normal(shape=executor.outputs[0].shape)

    def step() -> None:
        executor.forward(is_train=True)
        executor.backward(grad)

    return step


def trained(net: gluon.HybridBlock, data: mx.nd.NDArray) -> Callable[[], None]:
    data.attach_grad()
    with autograd.train_mode():
        head = mx.nd.random.normal(shape=net(data).shape)

    def step() -> None:
        with autograd.record():
            out = net(data)
        out.backward(head)

    return step


# Weights of a FullyConnected: inputs and outputs.
PRODUCTS = [(1024, 1024), (2048, 1000), (2048, 2048), (2048, 4096), (9216, 4096)]


def products(arguments: list[str]) -> None:
    """Time FullyConnected in FP32 and with all in bfloat16, forward and backward, by the number of rows."""
    args = parse(products.__doc__, arguments, rounds=11)

    def rows() -> Iterator[tuple[tuple[str, str], Steps]]:
        for inputs, outputs in PRODUCTS:
            for number in (8, 16, 32, 64, 96, 128, 256):
                data, steps = mx.nd.random.normal(shape=(number, inputs)), {}
                for dtype in ("FP32", "bfloat16"):
                    net = gluon.nn.Dense(outputs, in_units=inputs)
                    net.initialize()
                    net.hybridize(static_alloc=True, static_shape=True)
                    if dtype == "bfloat16":
                        mxmp.convert(net, dtype)
                    with mock.patch.object(missing_kernels, "_FEW_ROWS", ()):
                        steps[dtype] = trained(net, data)
                yield (f"{inputs}x{outputs}", str(number)), steps

    bench("weights | rows", rows(), args.rounds)


SGD: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}


def update(arguments: list[str]) -> None:
    """Time the check of FP32 gradients and SGD's update by MXNet's operators for many arrays, and by mxmp's choice.

    ``multi_sum_sq`` over all gradients against ``FiniteSums``; MXNet's Updater, which hands arrays to
    ``multi_sgd_mom_update`` four at a time, against mxmp's. Arrays have the shapes of a network's parameters.
    """
    networks = ["alexnet", "vgg16", "resnet50_v1b"]
    args = parse(update.__doc__, arguments, "models", models=(networks, "of GluonCV"), rounds=15)

    def rows() -> Iterator[tuple[tuple[str, str], Steps]]:
        from gluoncv.model_zoo import get_model

        for model in args.models:
            net = get_model(model, pretrained=False)
            net.initialize()
            net(mx.nd.ones((1, 3, 224, 224)))
            weights = [p.data() for p in net.collect_params().values() if p.grad_req != "null"]
            grads, copies = [weight * 1e-3 for weight in weights], [weight.copy() for weight in weights]
            sums = FiniteSums([Gradient(str(i), grad) for i, grad in enumerate(grads)])
            theirs = partial(mx.nd.multi_sum_sq, *grads, num_arrays=len(grads))
            yield (model, "check"), {"MXNet's": theirs, "mxmp's": sums}
            theirs = partial(mx.optimizer.Updater(mx.optimizer.SGD(**SGD)), [*range(len(grads))], grads, weights)
            ours = partial(Updater(mx.optimizer.SGD(**SGD)), [*range(len(grads))], grads, copies)
            yield (model, "update"), {"MXNet's": theirs, "mxmp's": ours}

    bench("network | part", rows(), args.rounds)
