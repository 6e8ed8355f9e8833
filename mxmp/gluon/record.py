"""What autograd has recorded of a loss: the graphs that a backward of it runs through."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import contextmanager
from functools import cached_property
from typing import Iterator, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..precision.graph import Graph, Node
from ..precision.heads import is_unscaled
from . import _mxnet

_OPERATOR = re.compile(r'"op": "(\w+)"')
_OPAQUE = re.compile(r'"op": "_CachedOp",\s+"name": "(\w+)"')
# The loss heads whose backward reads the attribute ``grad_scale`` anew; the others read it in their forward.
SCALED_BY_ATTRIBUTE = frozenset(
    ["SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"]
)
IS_A_COPY = (
    "the net is a copy (copy.deepcopy, pickle), whose arrays MXNet gives no gradients before the grad_req of each "
    "parameter was set to 'null' and back"
)
# MXNet's errors for an array that was not recorded: in get_symbol, and in backward.
_NOT_RECORDED = (
    "NDArray is not part of a computation graph",
    "it is not in a computational graph",
    "There are no inputs in computation graph that require gradients",
)


@contextmanager
def explain_unrecorded() -> Iterator[None]:
    """Replace MXNet's errors for a loss that was not recorded by a ``RuntimeError`` that says what to do."""
    try:
        yield
    except mx.MXNetError as error:
        if not any(words in str(error) for words in _NOT_RECORDED):
            raise
        raise RuntimeError(
            "the loss was not recorded: compute net(x) and the loss inside `with autograd.record():`. Where they are, "
            "nothing of it asks for a gradient (grad_req='null'), or an earlier backward used its record up "
            f"(retain_graph=True keeps it), or {IS_A_COPY}"
        ) from error


class Record:
    """The graphs that autograd recorded when ``losses`` were computed: what one backward of them reaches.
    Every property and method raises ``RuntimeError`` if a loss was not recorded."""

    def __init__(self, losses: Sequence[NDArray]) -> None:
        self.losses = losses

    @cached_property
    def _symbols(self) -> list[mx.sym.Symbol]:
        with explain_unrecorded():
            return [mx.autograd.get_symbol(loss) for loss in self.losses]

    @cached_property
    def _texts(self) -> list[str]:
        """Return the recorded graphs as JSON, one per loss, which are faster to search than Symbols."""
        return [symbol.tojson(remove_amp_cast=False) for symbol in self._symbols]

    @cached_property
    def leaves(self) -> set[str]:
        """Return the names that autograd has for the graphs' variables (``"var3"``): Parameters and inputs."""
        return {name for symbol in self._symbols for name in symbol.list_inputs()}

    @cached_property
    def operators(self) -> set[str]:
        """Return the types of all recorded operators; a hybridized block is one, ``"_CachedOp"``."""
        return {name for text in self._texts for name in _OPERATOR.findall(text)}

    @cached_property
    def calls(self) -> dict[str, mx.sym.Symbol]:
        """Return the calls of hybridized blocks, by the names of their nodes, each with a graph in which it is."""
        if "_CachedOp" not in self.operators:
            return {}
        found = zip(reversed(self._symbols), reversed(self._texts))
        return {name: symbol for symbol, text in found for name in _OPAQUE.findall(text)}

    @cached_property
    def graphs(self) -> list[Graph]:
        return [Graph.from_json(text) for text in self._texts]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return how many outputs the nodes of each graph have, leaves among them; in a tenth of the time of JSON."""
        return tuple(len(symbol.get_internals()) for symbol in self._symbols)

    @cached_property
    def readers(self) -> dict[str, set[str]]:
        """Return, for each of ``leaves``, the names of the nodes that read it."""
        found: dict[str, set[str]] = defaultdict(set)
        for text in self._texts:
            nodes = json.loads(text)["nodes"]  # a third of the time of a Graph
            for node in nodes:
                for source, *_ in node["inputs"]:
                    if nodes[source]["op"] == "null":
                        found[nodes[source]["name"]].add(node["name"])
        return found

    def nodes(self) -> Iterator[Node]:
        """Yield all recorded nodes. Takes 0.6 ms for a ResNet-50, so look in ``operators`` first."""
        for graph in self.graphs:
            yield from graph.nodes()

    def heads_with_attribute(self) -> list[tuple[mx.sym.Symbol, str]]:
        """Return each loss head of Python code that reads ``grad_scale`` in its backward, and its value as text."""
        if SCALED_BY_ATTRIBUTE.isdisjoint(self.operators):
            return []
        found = []
        for symbol, graph in zip(self._symbols, self.graphs):
            for node in graph.nodes():
                if node.op in SCALED_BY_ATTRIBUTE and is_unscaled(node):
                    found.append((_mxnet.recorded_node(symbol, node.name), node.attrs.get("grad_scale", "1")))
        return list({head.name: (head, own) for head, own in found}.values())
