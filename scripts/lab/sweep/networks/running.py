"""Errors, ratios, rounding, and what a net's graphs are called with."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.counting import Counts, count
from support.zoo.case import BFLOAT16, Case
from support.zoo.vision import all_blocks, without_drop_blocks

from mxmp.diagnose.advising.flops import ShapedNode, Tensor, shaped_nodes
from mxmp.precision._mxnet import dtype_name
from mxmp.precision.graph import Graph


class Call(NamedTuple):
    """One call of a block's graph in training: the FP32 Symbol, shapes and dtypes of all its inputs."""

    symbol: mx.sym.Symbol
    known: dict[str, tuple]


def cause(error: BaseException) -> str:
    """The line of an error's text that says what went wrong, without addresses and build paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "[bt]" not in line]
    telling = [n for n in lines if re.search(r"error:|check failed|not implemented|could not|unknown", n, re.I)]
    line = (telling or lines or [""])[-1]
    line = re.sub(r"^\[[\d:]+\]\s*|(\S*/)(?=src/)", "", line)
    line = re.sub(r"0x[0-9a-f]+", "0x…", line)
    return f"{type(error).__name__}: {line}"[:300]


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """Signal to noise in dB, at most 200 (equal) and at least -200 (not finite)."""
    if reference.shape != value.shape or not np.isfinite(value).all():
        return -200.0
    noise = float(np.sum((reference.astype("float64") - value) ** 2))
    signal = float(np.sum(reference.astype("float64") ** 2))
    if noise == 0:
        return 200.0
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / noise), -200, 200))


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to ``dtype`` and back."""
    if value.dtype != np.float32:
        return value
    if dtype == "float16":
        return value.astype("float16").astype("float32")
    return mx.nd.amp_cast(mx.nd.amp_cast(mx.nd.array(value), dtype=BFLOAT16), dtype="float32").asnumpy()


def with_rounded_inputs(case: Case, dtype: str) -> Case:
    """The same case on rounded inputs."""

    def inputs() -> list:
        return [x if x.dtype != np.float32 else array_like(x, rounded(x.asnumpy(), dtype)) for x in case.inputs()]

    return replace(case, inputs=inputs)


def array_like(other: Any, value: np.ndarray) -> Any:
    """An array of ``other``'s kind, ``mx.nd`` or ``mx.np``."""
    return (mx.np.array if isinstance(other, mx.np.ndarray) else mx.nd.array)(value, dtype=value.dtype)


def without_chance(net: gluon.Block) -> None:
    """No dropout, and running statistics that follow a few batches."""
    without_drop_blocks(net)
    for block in all_blocks(net):
        if isinstance(block, nn.Dropout):
            block._rate = 0
        if isinstance(getattr(block, "_kwargs", None), dict) and "momentum" in block._kwargs:
            block._kwargs["momentum"] = 0.1


def call(block: gluon.HybridBlock, args: Any) -> Call:
    inputs, symbol = block._get_graph(*args)
    known = {name: (p.shape, np.dtype(p.dtype)) for name, p in block.collect_params().items()}
    for variable, array in zip(inputs, _flat(args)):
        known[variable.name] = (array.shape, np.dtype(array.dtype))
    return Call(symbol, known)


def _flat(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg)
        elif arg is not None:
            yield arg


@contextlib.contextmanager
def calls() -> Iterator[list[Call]]:
    """Every call of a hybridized block's graph under ``record``."""
    found: list[Call] = []
    original = gluon.HybridBlock._call_cached_op

    def noted(block: gluon.HybridBlock, *args: Any) -> Any:
        out = original(block, *args)
        if autograd.is_recording() and not isinstance(block, gluon.loss.Loss):
            found.append(call(block, args))
        return out

    gluon.HybridBlock._call_cached_op = noted
    try:
        yield found
    finally:
        gluon.HybridBlock._call_cached_op = original


def steps(call: Call) -> Iterator[ShapedNode]:
    """Every operator of the call's graph, with shapes and dtypes."""
    return shaped_nodes(Graph.from_symbol(call.symbol), _tensors(call))


def _tensors(call: Call) -> dict[str, Tensor]:
    return {name: Tensor(shape, dtype_name(dtype)) for name, (shape, dtype) in call.known.items()}


def counted(calls: list[Call], total: list[Call] | None = None) -> dict[str, float | None]:
    """FLOPs, the low share of them, casts and bytes cast; the share is of the FLOPs of ``total``, if given."""
    found, whole = Counts(), Counts()
    for counts, graphs in ((found, calls), (whole, total or calls)):
        for each in graphs:
            counts.add(count(Graph.from_symbol(each.symbol), _tensors(each)))
    share = found.low_flops / whole.flops if whole.flops else None
    casts = {"casts": found.casts, "cast_bytes": found.cast_bytes, "output_bytes": found.output_bytes}
    return {"flops": whole.flops, "low_share": share, **casts}
