"""Other graphs for nets, made without mxmp: rewritten as JSON, or by another operator."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Callable, Iterator
from unittest import mock

import mxnet as mx
from mxnet import gluon


@contextlib.contextmanager
def rewritten(change: Callable[[dict], dict]) -> Iterator[None]:
    """Within it, hybridized nets build graphs that ``change`` makes of theirs."""
    original = gluon.HybridBlock._get_graph

    def changing(block: gluon.HybridBlock, *args: Any) -> Any:
        if block._cached_graph:
            return block._cached_graph
        inputs, symbol = original(block, *args)
        changed = mx.sym.load_json(json.dumps(change(json.loads(symbol.tojson(remove_amp_cast=False)))))
        if type(symbol) is not mx.sym.Symbol:
            changed = changed.as_np_ndarray()
        block._cached_graph = inputs, changed
        return block._cached_graph

    gluon.HybridBlock._get_graph = changing
    try:
        yield
    finally:
        gluon.HybridBlock._get_graph = original


@contextlib.contextmanager
def plain_copies(ops: tuple[str, ...]) -> Iterator[None]:
    """Within it, what these operators read first and write is copied in the plain layout.

    MXNet's FP32 itself cannot train some networks on a CPU: the backward of BatchNorm refuses oneDNN's 3-D layouts
    ("Check failed: !is_view"), and that of Concat parts of blocks ("could not construct a sub-memory").
    """
    with rewritten(lambda raw: _copied(raw, ops)) if ops else contextlib.nullcontext():
        yield


def _copied(raw: dict, ops: tuple[str, ...]) -> dict:
    nodes: list[dict] = []
    place: dict[int, int] = {}
    copies: dict[int, int] = {}  # of the first outputs

    def add(node: dict) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def copy(entry: list) -> int:
        attrs = {"axis": "0", "begin": "0", "end": "None"}
        return add({"op": "slice_axis", "name": f"copied{len(nodes)}", "attrs": attrs, "inputs": [entry]})

    def moved(entry: list) -> list:
        if entry[1] == 0 and entry[0] in copies:
            return [copies[entry[0]], 0, 0]
        return [place[entry[0]], *entry[1:]]

    for number, node in enumerate(raw["nodes"]):
        inputs = [moved(entry) for entry in node["inputs"]]
        if node["op"] in ops:
            inputs[0] = [copy(inputs[0]), 0, 0]
        place[number] = add(dict(node, inputs=inputs))
        if node["op"] in ops:
            copies[number] = copy([place[number], 0, 0])
    return with_nodes(raw, nodes, [moved(entry) for entry in raw["heads"]])


def with_nodes(raw: dict, nodes: list[dict], heads: list[list]) -> dict:
    """The JSON of a graph with other nodes."""
    variables = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    return {**raw, "nodes": nodes, "heads": heads, "arg_nodes": variables, "node_row_ptr": list(range(len(nodes) + 1))}


@contextlib.contextmanager
def zero_unassigned_rois() -> Iterator[None]:
    """Within it, ``ROIAlign`` gives zeros for regions with a batch index of -1.

    On a CPU MXNet's writes none of them and spoils the first region's values (``roi_align.cc``, ``top_data[n] = 0``):
    FP32 itself differs from one run to the next where a feature pyramid is used.
    """

    def wrapped(F: Any) -> Any:  # noqa: N803
        align = F.contrib.ROIAlign

        def assigned_only(data: Any, rois: Any, *args: Any, **options: Any) -> Any:
            assigned = F.slice_axis(rois, axis=1, begin=0, end=1).reshape((-1,)) >= 0
            boxes = F.broadcast_add(F.zeros_like(rois), F.arange(5).reshape((1, 5)))
            out = align(data, F.where(assigned, rois, boxes), *args, **options)
            return F.where(assigned, out, F.zeros_like(out))

        return mock.patch.object(F.contrib, "ROIAlign", assigned_only)

    with wrapped(mx.nd), wrapped(mx.sym):
        yield
