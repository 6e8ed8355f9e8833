"""What MXNet's monitor reports of a graph with casts, in the names of the network's own operators.

MXNet calls a monitor's callback with a name and an array for every node that runs: ``fc_output``,
``fc_backward_output0``, ``fc_weight``. Here nodes that mxmp inserted are left out, operators that it renamed have
their own names, and values arrive as FP32 arrays, rounded as the network rounds them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from .casts import MARK, PASSED, is_ours, passed_on, source_of
from .graph import Entry, Graph, Node
from .heads import SCALE_NAME
from .plan import Plan, rule_under

__all__ = ["SUMS", "GraphListener", "NetworkView", "Place", "in_full", "network_names", "place_of"]

# What MXNet calls its sums of gradients, where several operators read a tensor.
SUMS = re.compile(r"_?(sum|add)_grad")
_OUTPUT = re.compile(r"(?:output)?(\d*)")
# Of an input by its number, or, where MXNet's operator is of its older kind, by its name: ``in_backward_gamma``.
_GRADIENT = re.compile(r"backward_(?:(?:output)?(\d*)|(\w+))")
# Nodes of ours with these operators hand on values as they are, or rounded. Convolution: a copy in blocks of channels.
_COPIES = {"Cast", "amp_cast", "_copy", "slice_axis", "amp_multicast", "Convolution", "_identity_with_attr_like_rhs"}
_INPUTS = {"data": 0, "input0": 0, "lhs": 0, "weight": 1, "input1": 1, "rhs": 1}


def network_names(graph: Graph, plan: Plan) -> dict[Node, str]:
    """The network's own operators in a graph that follows ``plan``, with their names in the FP32 graph."""
    names = {}
    for node in graph.nodes():
        if node.name in plan.decisions and not is_ours(node):
            names[node] = node.name
        elif node.attrs.get(MARK) == "head":  # it took the name of the operator behind it
            names[source_of(Entry(node)).node] = node.name
    return names


def in_full(array: NDArray) -> NDArray:
    """``array`` where it is FP32 or an integer, an FP32 copy where it is float16 or bfloat16."""
    dtype = np.dtype(array.dtype)
    if dtype == np.float16:
        return array.astype("float32")
    return mx.nd.amp_cast(array, dtype="float32") if dtype.names == ("bfloat16",) else array


class GraphListener:
    """A callback of a monitor that wants every node of the graph that runs, by the name that it has there."""


class Place(NamedTuple):
    """What a monitor's name stands for: ``what`` is "output", "gradient" (of an input) or "input", of one node."""

    node: Node
    what: str
    number: int | None
    suffix: str


class _Report(NamedTuple):
    """The arguments for a monitor's callback.

    ``op``: None if MXNet's operator name is right. ``rounded``: a cast rounded the values to the compute dtype.
    """

    name: str
    op: str | None
    array: NDArray
    rounded: bool


class NetworkView:
    """The network's own operators in the reports of one graph.

    Parameters
    ----------
    symbol : Symbol
        What runs.
    plan : Plan
        What it follows.
    """

    def __init__(self, symbol: mx.sym.Symbol, plan: Plan) -> None:
        graph = Graph.from_symbol(symbol)
        self._plan = plan
        self._names = network_names(graph, plan)
        self._nodes = {node.name: node for node in reversed(list(graph.nodes()))}
        # Where a node of ours changes values or shapes on the way to an operator, or behind it (a padded convolution,
        # a clip in two): that node, and the input (None: the output) of the operator for which it stands.
        self._stands_for: dict[Node, tuple[Node, str, int | None]] = {}
        owners = {name: node for node, name in self._names.items()}
        read: list[tuple[Entry, Node | None, int]] = [(head, None, 0) for head in graph.heads]
        read += [(entry, node, position) for node in self._names for position, entry in enumerate(node.inputs)]
        for entry, reader, position in read:
            for change in _changes(entry):
                owner = owners.get(change.name) or _longest(owners, change.name)[0]
                if owner is not None:
                    in_front = owner is reader
                    self._stands_for[change] = (owner, "gradient", position) if in_front else (owner, "output", 0)
        self._changed = set(self._stands_for.values())
        self._suffixes: dict[tuple, str] = {}
        self._inputs: dict[tuple, NDArray] = {}

    def translated(self, callback: Callable) -> Callable:
        """Return the function that MXNet calls instead of a user's monitor callback, with the network's own names."""

        def report(name: bytes, *op_and_handle: Any) -> None:
            *op, handle = op_and_handle
            array = NDArray(NDArrayHandle(handle), writable=False)  # frees the handle
            with autograd.pause():
                found = self._read(name.decode(), array, in_gluon=bool(op))
                if found is None:
                    return
                array = in_full(found.array.astype("float16") if found.rounded else found.array)
            if op and found.op:
                op = [found.op.encode()]
            handle, array.handle = array.handle, NDArrayHandle()  # the callback's to free, as MXNet's are
            callback(found.name.encode(), *op, handle.value)

        return report

    def _read(self, name: str, array: NDArray, in_gluon: bool) -> _Report | None:
        """Return the name to report for this tensor; None for a tensor that is not the network's."""
        if name in self._nodes and self._nodes[name].is_variable:
            return None if name == SCALE_NAME else _Report(name, None, array, False)
        place = place_of(self._nodes, name)
        if place is None:
            return _Report(name, None, array, False)  # MXNet's own: a sum of gradients
        if place.node in self._stands_for:
            return self._read_change(place, array)
        if place.node not in self._names:
            return None
        key = (place.node, place.what, place.number)
        if key in self._changed and place.what == "gradient":
            self._suffixes[key] = place.suffix
        if place.what == "input":
            array = self._inputs.pop(key, array)
        elif key in self._changed:
            return None
        decision = self._plan.decisions[self._names[place.node]]
        if in_gluon and decision.op != place.node.op and place.suffix == "output":
            place = place._replace(suffix="0")  # as of operators whose outputs have no names
        return self._report(place, array)

    def _read_change(self, place: Place, array: NDArray) -> _Report | None:
        """Return the name for a node of ours that stands for an operator's own input or output."""
        key = node, what, number = self._stands_for[place.node]
        passed = int(place.node.attrs.get(PASSED, "0"))
        if what == "output":
            return self._report(Place(node, what, number, place.suffix), array) if place.what == what else None
        if place.what == "gradient" and place.number == passed and key in self._suffixes:
            return self._report(Place(*key, self._suffixes.pop(key)), array)
        if place.what == "input" and len(place.node.inputs) == 1:
            self._inputs[node, "input", number] = array.copy()  # its memory may be another's soon
        return None

    def _report(self, place: Place, array: NDArray) -> _Report:
        name = self._names[place.node]
        decision = self._plan.decisions[name]
        op = None if place.what == "gradient" else decision.op
        # bfloat16 operators make bfloat16 by themselves, and what a kernel reads was rounded before.
        rounded = decision.low and self._plan.policy.compute == "float16" and place.what != "input"
        rule = rule_under(self._plan.policy, decision.op)
        kept = rule.keep if place.what == "gradient" else rule.keep_outputs
        return _Report(f"{name}_{place.suffix}", op, array, rounded and place.number not in (None, *kept))


def place_of(nodes: Mapping[str, Node], name: str) -> Place | None:
    """Return what the monitor's ``name`` stands for, given the graph's nodes by name; None where it names no node."""
    node, suffix = _longest(nodes, name)
    if node is None:
        return None
    output, gradient = _OUTPUT.fullmatch(suffix), _GRADIENT.fullmatch(suffix)
    if output:
        return Place(node, "output", int(output[1] or 0), suffix)
    if gradient and gradient[2] is None:
        return Place(
            node, "gradient", int(gradient[1] or 0) + (node.op == "where"), suffix
        )  # no gradient of a condition
    names = _input_names(node.op, frozenset(node.attrs.items())) if gradient else []
    if gradient and gradient[2] in names:
        return Place(node, "gradient", names.index(gradient[2]), suffix)
    return Place(node, "input", _INPUTS.get(suffix), suffix)


@lru_cache(maxsize=None)
def _input_names(op: str, attrs: frozenset[tuple[str, str]]) -> list[str]:
    """Return what MXNet calls the inputs of an operator with these attributes; nothing for an internal operator."""
    home, name = (mx.sym.contrib, op[len("_contrib_") :]) if op.startswith("_contrib_") else (mx.sym, op)
    if not hasattr(home, name):
        return []
    symbol = getattr(home, name)(**{key: value for key, value in attrs if not key.startswith("__")})
    return [each[len(f"{symbol.name}_") :] for each in symbol.list_inputs()]


def _longest(nodes: Mapping[str, Node], name: str) -> tuple[Node | None, str]:
    """The node with the longest name that ``name`` begins with, and what follows it."""
    parts = name.split("_")
    for end in range(len(parts) - 1, 0, -1):
        node = nodes.get("_".join(parts[:end]))
        if node is not None:
            return node, "_".join(parts[end:])
    return None, ""


def _changes(entry: Entry) -> Iterator[Node]:
    """Return the nodes of mxmp before an operator that change more than the dtype; the nearest first."""
    while is_ours(entry.node) and entry.node.inputs:
        if entry.node.op not in _COPIES:
            yield entry.node
        entry = passed_on(entry)
