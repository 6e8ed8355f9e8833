"""FP32 kernels between values rounded to a dtype: what perfect kernels of the dtype would give."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Iterator

import mxnet as mx
from mxnet import gluon

from mxmp.diagnose.advising.gemm import is_matrix

__all__ = ["rounded_matrices"]


@contextlib.contextmanager
def rounded_matrices(dtype: str) -> Iterator[None]:
    """Within it, hybridized nets build graphs that round what every matrix operator reads and writes."""
    original = gluon.HybridBlock._get_graph

    def rounding(block: gluon.HybridBlock, *args: Any) -> Any:
        if block._cached_graph:
            return block._cached_graph
        inputs, symbol = original(block, *args)
        text = symbol.tojson(remove_amp_cast=False)
        casted = mx.sym.load_json(json.dumps(_rounded(json.loads(text), dtype)))
        if type(symbol) is not mx.sym.Symbol:
            casted = casted.as_np_ndarray()
        block._cached_graph = inputs, casted
        return block._cached_graph

    gluon.HybridBlock._get_graph = rounding
    try:
        yield
    finally:
        gluon.HybridBlock._get_graph = original


def _rounded(raw: dict, dtype: str) -> dict:
    """The graph with a pair of casts at every input and output of matrix operators, in bodies too."""
    nodes: list[dict] = []
    place: dict[int, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    after: set[int] = set()

    def pair(entry: list) -> list:
        key = (entry[0], entry[1])
        if nodes[entry[0]]["op"] == "amp_cast" and nodes[entry[0]]["name"].startswith("rounded"):
            return entry
        if key not in pairs:
            # The copy is for the backward of amp_cast, which adds nothing to a gradient that is summed in place.
            before = [*entry[:2], 0]
            for op, attrs in (("_copy", {}), ("amp_cast", {"dtype": dtype}), ("amp_cast", {"dtype": "float32"})):
                nodes.append({"op": op, "name": f"rounded{len(nodes)}", "attrs": attrs, "inputs": [before]})
                before = [len(nodes) - 1, 0, 0]
            pairs[key] = len(nodes) - 1
        return [pairs[key], 0, 0]

    def moved(entry: list) -> list:
        here = [place[entry[0]], *entry[1:]]
        return pair(here) if entry[0] in after and entry[1] == 0 else here

    for number, node in enumerate(raw["nodes"]):
        matrix = is_matrix(node["op"])
        inputs = [moved(entry) for entry in node["inputs"]]
        if matrix:
            # FP32's Deconvolution cannot run its backward where the weight is computed: its caller rounds that.
            spared = 1 if node["op"] == "Deconvolution" else None
            inputs = [entry if index == spared else pair(entry) for index, entry in enumerate(inputs)]
            after.add(number)
        changed = dict(node, inputs=inputs)
        if "subgraphs" in node:
            changed["subgraphs"] = [_rounded(body, dtype) for body in node["subgraphs"]]
        nodes.append(changed)
        place[number] = len(nodes) - 1
    heads = [moved(entry) for entry in raw["heads"]]
    variables = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    return {**raw, "nodes": nodes, "heads": heads, "arg_nodes": variables, "node_row_ptr": list(range(len(nodes) + 1))}
