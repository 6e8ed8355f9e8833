"""Times on a GPU what no record of its launches can say: layouts of convolutions and norms, and MXNet's fusion.

Each part is a forward and backward, called many times without waiting in between; kept are the seconds of one call.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import mxnet as mx
from mxnet import autograd, gluon
from support.options import parse
from support.pages import show
from support.results import ROOT, write

from bench.turns import milliseconds

CALLS = 20
BATCH = 64
# Of ResNet-50, and one of ResNeXt-50: kernel's side, channels in and out, groups, side of the picture.
CONVOLUTIONS = ((3, 64, 64, 1, 56), (1, 256, 64, 1, 56), (3, 512, 512, 1, 7), (3, 128, 128, 32, 56))
DTYPES = ("float32", "float16")
Call = Callable[[], Any]


def main(arguments: list[str] | None = None) -> None:
    args = parse(*(__doc__, arguments), rounds=11, results=(ROOT / "gpu-parts.json", "seconds by part"))
    if not mx.context.num_gpus():
        raise SystemExit("error: MXNet sees no GPU")
    mx.test_utils.set_default_context(mx.gpu())
    found = measured(args.rounds)
    write(Path(args.results), found)
    show("part | ms", ([name, shown(each)] for name, each in found.items()))


def shown(figures: dict[str, Any]) -> str:
    return figures.get("error") or f"{milliseconds(figures['seconds']):.3f}"


def measured(rounds: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of a call of each part, in each round, or its error."""
    found: dict[str, dict[str, Any]] = {}
    for name, make in parts().items():
        try:
            found[name] = {"seconds": seconds(make(), rounds)}
        except mx.MXNetError as error:  # cuDNN has not every layout in every dtype
            found[name] = {"error": str(error).strip().splitlines()[-1][:200]}
    return found


def seconds(call: Call, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds + 1):  # in the first cuDNN chooses its algorithms
        mx.nd.waitall()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        mx.nd.waitall()
        found.append((time.perf_counter() - start) / CALLS)
    return found[1:]


def parts() -> dict[str, Callable[[], Call]]:
    """Return what makes each part, by its name."""
    found: dict[str, Callable[[], Call]] = {}
    for dtype in DTYPES:
        for shape in CONVOLUTIONS:
            side, inputs, outputs, groups, picture = shape
            of = f"{side} x {side}, {inputs} to {outputs}" + f", {groups} groups" * (groups > 1)
            for layout in ("NCHW", "NHWC"):
                found[f"convolution {of}, {picture}², {layout}, {dtype}"] = partial(convolution, shape, layout, dtype)
        for title, axis, sizes in NORMS:
            found[f"BatchNorm, {title}, {dtype}"] = partial(norm, axis, sizes, dtype)
        for fused in (True, False):
            found[f"{CHAIN} operators, {'fused' if fused else 'not fused'}, {dtype}"] = partial(chain, fused, dtype)
    return found


def convolution(shape: tuple[int, int, int, int, int], layout: str, dtype: str) -> Call:
    side, inputs, outputs, groups, picture = shape
    sizes = {"N": BATCH, "C": inputs, "H": picture, "W": picture}
    kernel = {"N": outputs, "C": inputs // groups, "H": side, "W": side}
    x, w = (random(*(each[axis] for axis in layout), dtype=dtype) for each in (sizes, kernel))
    options = {"kernel": (side, side), "pad": (side // 2,) * 2, "num_filter": outputs, "num_group": groups}
    return trained(partial(mx.nd.Convolution, no_bias=True, layout=layout, **options), x, w)


# MXNet gives cuDNN an axis 3 as a tensor of as many pictures as there are pixels, of 1 x 1.
NORMS = (
    ("axis 1", 1, (BATCH, 256, 28, 28)),
    ("axis 3", 3, (BATCH, 28, 28, 256)),
    ("axis 1 of (N·H·W, C, 1, 1)", 1, (BATCH * 28 * 28, 256, 1, 1)),
)


def norm(axis: int, shape: tuple[int, ...], dtype: str) -> Call:
    x, (gamma, beta, mean, var) = random(*shape, dtype=dtype), (mx.nd.ones(shape[axis]) for _ in range(4))

    def normalized(x: mx.nd.NDArray, gamma: mx.nd.NDArray, beta: mx.nd.NDArray) -> mx.nd.NDArray:
        return mx.nd.BatchNorm(x, gamma, beta, mean, var, axis=axis, fix_gamma=False)

    return trained(normalized, x, gamma, beta)


CHAIN = 4


class Chain(gluon.HybridBlock):
    """Pointwise operators, one after the other."""

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return F.relu(F.tanh(x + y) * 2)


def chain(fused: bool, dtype: str) -> Call:
    x, y = (random(BATCH, 256, 28, 28, dtype=dtype) for _ in range(2))
    net = Chain()
    net.hybridize(static_alloc=True, static_shape=True)
    with mock.patch.dict(os.environ, MXNET_USE_FUSION=str(int(fused))):  # read when a graph is made, in the first call
        call = trained(net, x, y)
        call()
        mx.nd.waitall()
    return call


def random(*shape: int, dtype: str) -> mx.nd.NDArray:
    return mx.nd.random.normal(shape=shape).astype(dtype)


def trained(function: Callable[..., Any], *arrays: mx.nd.NDArray) -> Call:
    """Return a call of the forward and backward, with the gradients of all arrays."""
    for array in arrays:
        array.attach_grad()
    with autograd.train_mode():
        head = mx.nd.ones_like(function(*arrays))

    def call() -> None:
        with autograd.record():
            result = function(*arrays)
        result.backward(head)

    return call
