"""The matrix arithmetic of a graph and its casts, counted from the graph's shapes and dtypes.

One count for mxmp's graphs and ``mxnet.contrib.amp``'s, the bodies of control flow included.
"""

from __future__ import annotations

import json
from ast import literal_eval
from dataclasses import dataclass
from math import prod
from typing import Any, Iterator

import mxnet as mx
import numpy as np

from .case import BFLOAT16

__all__ = ["Counts", "count", "is_matrix"]

_LOW = (np.dtype("float16"), BFLOAT16)
_CASTS = ("amp_cast", "Cast", "amp_multicast")
_PRODUCTS = ("dot", "batch_dot", "_linalg_gemm", "_linalg_gemm2", "_npi_matmul", "_np_dot", "_npi_tensordot_int_axes")
_CONVOLUTIONS = {  # where the weight stands among the inputs
    "Convolution": 1,
    "_contrib_DeformableConvolution": 2,
    "_contrib_ModulatedDeformableConvolution": 3,
}
_BODIES = {
    "_foreach": [None],
    "_while_loop": ["cond_input_locs", "func_input_locs"],
    "_cond": ["cond_input_locs", "then_input_locs", "else_input_locs"],
}


@dataclass
class Counts:
    """FLOPs of matrix operators in one forward, those that read low inputs, casts and the bytes that they move."""

    flops: float = 0.0
    low_flops: float = 0.0
    casts: int = 0
    cast_bytes: float = 0.0

    def add(self, other: Counts, times: float = 1) -> None:
        self.flops += other.flops * times
        self.low_flops += other.low_flops * times
        self.casts += other.casts
        self.cast_bytes += other.cast_bytes * times


def count(text: str, known: dict[str, tuple[tuple, np.dtype]], *, numpy: bool = False) -> Counts:
    """Count a graph in Symbol JSON, given shapes and dtypes of its inputs (of bodies: by their own names)."""
    raw = json.loads(text)
    nodes = raw["nodes"]
    found = _infer(raw, known, numpy)
    total, seen = Counts(), set()
    for number, node in enumerate(nodes):
        ins = [found.get((i, index)) for i, index, *_ in node["inputs"]]
        outs = found.get((number, 0))
        if node["op"] in _CASTS:
            for place, (entry, before) in enumerate(zip(node["inputs"], ins)):
                after = found.get((number, place))
                if before is None or after is None or before[1] == after[1]:
                    continue
                key = (*entry[:2], str(after[1]))
                if key not in seen:  # MXNet computes equal ones once
                    seen.add(key)
                    total.casts += 1
                    total.cast_bytes += prod(before[0]) * (before[1].itemsize + after[1].itemsize)
        elif node["op"] in _BODIES:
            for body, times, inner in _bodies(node, ins):
                total.add(count(json.dumps(body), inner, numpy=numpy), times)
        elif outs is not None and None not in ins:
            flops = _flops(node["op"], node.get("attrs", {}), [shape for shape, _ in ins], outs[0])
            total.flops += flops
            total.low_flops += flops * (bool(ins) and ins[0][1] in _LOW)
    return total


def _infer(raw: dict, known: dict, numpy: bool) -> dict[tuple[int, int], tuple[tuple, np.dtype]]:
    """Shape and dtype of every output of every node, by the node's number and the output's."""
    inputs = {node["name"]: node for node in raw["nodes"] if node["op"] == "null"}
    renamed = [dict(n, name=n["name"] if n["op"] == "null" else f"node{i}") for i, n in enumerate(raw["nodes"])]
    everything = [[i, 0, 0] for i, n in enumerate(renamed) if n["op"] != "null"] or raw["heads"]
    symbol = mx.sym.load_json(json.dumps({**raw, "nodes": renamed, "heads": everything})).get_internals()
    if numpy:
        symbol = symbol.as_np_ndarray()
    shapes = {name: shape for name, (shape, _) in known.items() if name in inputs}
    typed = {name for name, node in inputs.items() if "__dtype__" in node.get("attrs", {})}
    dtypes = {name: dtype for name, (_, dtype) in known.items() if name in inputs.keys() - typed}
    _, found_shapes, _ = symbol.infer_shape_partial(**shapes)
    _, found_dtypes, _ = symbol.infer_type_partial(**dtypes)
    numbers = {n["name"]: i for i, n in enumerate(renamed)}
    result: dict[tuple[int, int], tuple[tuple, np.dtype]] = {}
    indices: dict[int, int] = {}
    for name, shape, dtype in zip(symbol.list_outputs(), found_shapes, found_dtypes):
        number = numbers[name] if name in inputs else numbers[name.split("_")[0]]
        index = indices[number] = indices.get(number, -1) + 1
        if shape and all(size > 0 for size in shape) and dtype is not None:
            result[number, index] = (tuple(shape), np.dtype(dtype))
    return result


def _bodies(node: dict, ins: list) -> Iterator[tuple[dict, float, dict[str, Any]]]:
    """Each body, how often it runs, and what is known of its inputs."""
    attrs = node["attrs"]
    for number, key in enumerate(_BODIES[node["op"]]):
        body = node["subgraphs"][number]
        names = [n["name"] for n in body["nodes"] if n["op"] == "null"]
        inner: dict[str, Any] = {}
        if key is None:
            kinds = ("in_data_locs", "in_state_locs", "remain_locs")
            places = [place for kind in kinds for place in literal_eval(attrs.get(kind, "[]"))]
            data = len(literal_eval(attrs["in_data_locs"]))
            times: float = ins[0][0][0] if ins[0] else 1
            for position, (place, known) in enumerate(zip(places, ins)):
                if known:
                    inner[names[place]] = (known[0][1:], known[1]) if position < data else known
        else:
            times = float(attrs["max_iterations"]) if node["op"] == "_while_loop" else 1 if number == 0 else 0.5
            for name, place in zip(names, literal_eval(attrs.get(key, "[]"))):
                if ins[place]:
                    inner[name] = ins[place]
        yield body, times, inner


def is_matrix(op: str) -> bool:
    """Whether an operator multiplies matrices."""
    named = op in (*_CONVOLUTIONS, *_PRODUCTS, "Deconvolution", "FullyConnected", "RNN")
    return named or op.startswith("_contrib_interleaved_matmul")


def _flops(op: str, attrs: dict[str, str], ins: list[tuple], out: tuple) -> float:
    """FLOPs of one operator, 0 for one that multiplies no matrices."""
    if op in _CONVOLUTIONS:
        return 2.0 * prod(out) * prod(ins[_CONVOLUTIONS[op]][1:])
    if op == "Deconvolution":
        return 2.0 * prod(ins[0]) * prod(ins[1][1:])
    if op == "FullyConnected":
        return 2.0 * prod(out) * ins[1][1]
    if op in _PRODUCTS:
        # With (m, k) and (k, n): the sizes' product is m k k n, the output's m n, so k is the root of the quotient.
        batch = prod(out[:-2]) if op in ("batch_dot", "_linalg_gemm", "_linalg_gemm2", "_npi_matmul") else 1
        inner = (prod(ins[0]) * prod(ins[1]) / prod(out) / batch) ** 0.5
        return 2.0 * prod(out) * inner
    if op.startswith("_contrib_interleaved_matmul"):
        # queries x keys x width, whatever is read interleaved
        heads = int(attrs["heads"])
        if op.endswith("_qk"):
            return 2.0 * prod(out) * ins[0][2] / heads / (3 if "selfatt" in op else 1)
        return 2.0 * prod(out) * ins[1][2]
    if op == "RNN":
        return 2.0 * prod(ins[0][:2]) * ins[1][0]
    return 0.0
