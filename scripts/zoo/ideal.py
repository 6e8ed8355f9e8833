"""FP32 kernels between values rounded to a dtype: what perfect kernels of the dtype would give."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Iterator, Tuple

from mxmp.diagnose.advising.gemm import is_matrix
from mxmp.precision.rules import Kind, rule_of

from .rewriting import rewritten, with_nodes

Place = Tuple[int, int]  # number of a node, and which of its outputs


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
            if is_matrix(node["op"]) or (throughout and node["op"] != "null" and self._follows(node)):
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
        if is_matrix(node["op"]):
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
