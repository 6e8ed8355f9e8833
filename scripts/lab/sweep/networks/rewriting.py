"""Other graphs for nets, made without mxmp: as perfect kernels would compute, or as MXNet's FP32 can be trained."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any, Callable, Iterator, Tuple
from unittest import mock

import mxnet as mx
from mxnet import gluon

from mxmp.diagnose.advising.gemm import PRODUCTS
from mxmp.precision.rule import Kind
from mxmp.precision.rules import rule_of

Place = Tuple[int, int]  # number of a node, and which of its outputs


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


@contextlib.contextmanager
def rounded_kernels(dtype: str, *, throughout: bool = False) -> Iterator[None]:
    """Within it, hybridized nets build graphs that round what matrix operators read and write.

    Gradients are rounded at the same places: each reader's, and their sum, as a GPU does. ``throughout``: pointwise
    operators and norms that read low values write low values too.
    """
    with rewritten(lambda raw: _Rounding(raw, dtype, throughout).graph()):
        yield


class _Rounding:
    """One graph, or body of control flow, with a pair of casts wherever a low operator reads or writes."""

    def __init__(self, raw: dict, dtype: str, throughout: bool) -> None:
        self.raw, self.dtype, self.throughout = raw, dtype, throughout
        self.low: set[int] = set()  # nodes that write low values
        for number, node in enumerate(raw["nodes"]):
            if node["op"] in PRODUCTS or (throughout and node["op"] != "null" and self._follows(node)):
                self.low.add(number)
        self.readers = Counter(
            _place(entry)
            for number, node in enumerate(raw["nodes"])
            for position, entry in enumerate(node["inputs"])
            if self._is_pair(number, position)
        )
        self.readers.update(_place(entry) for entry in raw["heads"] if self._is_low(entry))
        self.nodes: list[dict] = []
        self.place: dict[int, int] = {}
        self.shared: dict[Place, list] = {}

    def _is_low(self, entry: list) -> bool:
        """Whether it is rounded where it is written: of norms and matrix operators, the first output."""
        op = self.raw["nodes"][entry[0]]["op"]
        return entry[0] in self.low and (entry[1] == 0 or rule_of(op).kind is Kind.FOLLOW)

    def _follows(self, node: dict) -> bool:
        """Whether all that it reads is low, or a variable, which is cast as one likes."""
        rule = rule_of(node["op"])
        kind, _ = rule.resolve(node.get("attrs", {}), self.dtype)
        if kind not in (Kind.FOLLOW, Kind.NORM):
            return False
        read = [entry for position, entry in enumerate(node["inputs"]) if position not in rule.keep]
        rest = [entry for entry in read if not self._is_low(entry)]
        return len(rest) < len(read) and all(self.raw["nodes"][entry[0]]["op"] == "null" for entry in rest)

    def _is_pair(self, number: int, position: int) -> bool:
        """Whether this input of a node goes through casts: it is low, or a low operator reads it."""
        node = self.raw["nodes"][number]
        if self._is_low(node["inputs"][position]):
            return True
        if node["op"] in PRODUCTS:
            # FP32's Deconvolution cannot run its backward where the weight is computed: its caller rounds that.
            return not (node["op"] == "Deconvolution" and position == 1)
        return number in self.low and position not in rule_of(node["op"]).keep

    def graph(self) -> dict:
        for number, node in enumerate(self.raw["nodes"]):
            inputs = [self._read(entry, self._is_pair(number, k)) for k, entry in enumerate(node["inputs"])]
            changed = dict(node, inputs=inputs)
            if "subgraphs" in node:
                bodies = node["subgraphs"]
                changed["subgraphs"] = [_Rounding(body, self.dtype, self.throughout).graph() for body in bodies]
            self.nodes.append(changed)
            self.place[number] = len(self.nodes) - 1
        heads = [self._read(entry, self._is_low(entry)) for entry in self.raw["heads"]]
        return with_nodes(self.raw, self.nodes, heads)

    def _read(self, entry: list, rounded: bool) -> list:
        place = _place(entry)
        here = [self.place[entry[0]], *entry[1:]]
        if not rounded:
            return here
        if place not in self.shared:
            self.shared[place] = self._pair(here)
        return self._pair(self.shared[place]) if self.readers[place] > 1 else self.shared[place]

    def _pair(self, entry: list) -> list:
        # The copy is for the backward of amp_cast, which adds nothing to a gradient that is summed in place. Its mark
        # keeps MXNet from merging the pairs of two readers, whose gradients it would sum before it rounds.
        apart = {"__apart__": str(len(self.nodes))}
        casts = (("_copy", apart), ("amp_cast", {"dtype": self.dtype}), ("amp_cast", {"dtype": "float32"}))
        for op, attrs in casts:
            self.nodes.append({"op": op, "name": f"rounded{len(self.nodes)}", "attrs": attrs, "inputs": [entry]})
            entry = [len(self.nodes) - 1, 0, 0]
        return entry


def _place(entry: list) -> Place:
    return entry[0], entry[1]
