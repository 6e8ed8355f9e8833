"""Translates what MXNet's monitor reports of a graph with casts to the FP32 network's operators and values.

MXNet calls a monitor's callback with a name (``fc_output``, ``fc_backward_output0``, ``fc_weight``) and an array.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from .casts import MARK, PASSED, is_ours, passed_on, source_of
from .graph import Entry, Graph, Node
from .heads import SCALE_NAME
from .plan import Plan
from .rules import rule_under

# Called with the monitor's name of a tensor, and the tensor.
Listener = Callable[[str, NDArray], None]
# The names under which a monitor reports MXNet's own sums of gradients, of a tensor that several operators read.
SUMS = re.compile(r"_?(sum|add)_grad")
# What follows a node's name where the tensor is an output: ``_output``, ``_output1``, ``_1``.
_OUTPUT = re.compile(r"(?:output)?(\d*)")
# What follows it where the tensor is a gradient of an input: the input's number, or its name for operators that MXNet
# registers the old way (``_backward_output0``, ``_backward_gamma``); or the role of an input that has no gradient but
# zeros (``_cond_backward_0``).
_GRADIENT = re.compile(r"(?:(cond|index|rhs)_)?backward_(?:(?:output)?(\d*)|(\w+))")
_ZEROS = {"cond": 0, "index": 1, "rhs": 1}
# Nodes that mxmp inserted with these operators pass their input on as it is or rounded. Convolution: a copy in another
# layout.
_COPIES = {"Cast", "amp_cast", "amp_multicast", "_copy", "slice", "slice_axis", "Convolution"}
_COPIES |= {"_identity_with_attr_like_rhs"}
_WITH_CONDITION = {"where", "_npi_where", "_npi_where_lscalar", "_npi_where_rscalar"}
_INPUTS = {"data": 0, "input0": 0, "lhs": 0, "weight": 1, "input1": 1, "rhs": 1}
# What a user's monitor callback gets: the tensor's name in the FP32 network, ``"fc_output"``, the operator's type there
# (None: that which MXNet reports), and the values.
_Report = Tuple[str, Optional[str], NDArray]


def network_names(graph: Graph, plan: Plan) -> dict[Node, str]:
    """Return the FP32 graph's name of each of the network's operators in ``graph``: ``"fc"`` for ``"fc_float16"``.
    A second ``"fc"`` is ``"fc"`` too, although ``plan`` calls it ``"fc:1"``. Operators in bodies are left out."""
    names = {}
    for node in graph.nodes():
        if node.name in plan.decisions and not is_ours(node):
            names[node] = node.name
        elif node.attrs.get(MARK) == "head":  # it took the name of the operator in front of it
            names[source_of(Entry(node)).node] = node.name
    return names


def in_full(array: NDArray) -> NDArray:
    """Return a float16 or bfloat16 array in FP32, and any other as it is; does not wait for the device."""
    dtype = np.dtype(array.dtype)
    if dtype == np.float16:
        return array.astype("float32")
    return mx.nd.amp_cast(array, dtype="float32") if dtype.names == ("bfloat16",) else array


class GraphListener:
    """Base class of mxmp's own monitor callbacks, which get names and values as they are in the graph with casts.
    Any other callback is a user's, called through a ``NetworkView``. MXNet's arguments: ``(name, op, handle)`` in
    Gluon, ``(name, handle)`` for an executor."""


class Place(NamedTuple):
    """The tensor that MXNet's monitor reports under a name such as ``"fc_output"``."""

    node: Node
    what: str  # "output", "gradient" (of an input) or "input"
    number: int | None  # position of the output or input; None for an input that ``_INPUTS`` lacks, ``"fc_bias"``
    suffix: str  # ``"output"`` in ``"fc_output"``


class NetworkView:
    """Translates, for one callback that a user wrote for the FP32 network, what MXNet reports of a graph with casts."""

    def __init__(self, symbol: mx.sym.Symbol, plan: Plan) -> None:
        graph = Graph.from_symbol(symbol)
        self._plan = plan
        self._names = network_names(graph, plan)
        self._nodes = {node.name: node for node in reversed(list(graph.nodes()))}
        # From an inserted node that changes values or shapes next to an operator of the network to the tensor of this
        # operator as which it is reported: (operator, "gradient", position of the input) for a node in front of it,
        # such as a convolution's Pad; (operator, "output", 0) for one behind it, such as a slice that crops its output.
        self._stands_for: dict[Node, tuple[Node, str, int]] = {}
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
        """Return a function to register in place of ``callback``, which gets the FP32 network's names and values."""

        def report(name: bytes, *op_and_handle: Any) -> None:
            # MXNet calls this with the tensor's name, the operator's type (in Gluon only), and the array's handle.
            *op, handle = op_and_handle
            array = NDArray(NDArrayHandle(handle), writable=False)  # frees the handle
            with autograd.pause():
                found = self._read(name.decode(), array, in_gluon=bool(op))
                if found is None:
                    return
                own_name, own_op, array = found[0], found[1], in_full(found[2])
            if op and own_op:
                op = [own_op.encode()]
            handle, array.handle = array.handle, NDArrayHandle()  # the callback frees it, as it frees MXNet's handles
            callback(own_name.encode(), *op, handle.value)

        return report

    def _read(self, name: str, array: NDArray, in_gluon: bool) -> _Report | None:
        """Return what a user's callback gets for the tensor that MXNet calls ``name``, or None not to call it."""
        if name in self._nodes and self._nodes[name].is_variable:
            return None if name == SCALE_NAME else (name, None, array)
        place = place_of(self._nodes, name)
        if place is None:
            return name, None, array  # a sum of gradients, which MXNet makes
        if place.node in self._stands_for:
            return self._read_change(place, array)
        if place.node not in self._names or _is_of_scale(place):
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
            place = place._replace(suffix="0")  # so MXNet reports outputs without a name
        return self._report(place, array)

    def _read_change(self, place: Place, array: NDArray) -> _Report | None:
        """Return what a callback gets for a tensor of an inserted node that changes values or shapes, or None."""
        # The callback gets the output of a slice behind a deconvolution as that of the deconvolution. Of a Pad in front
        # of a convolution, the gradient of the input is that of the convolution's; ``_read`` reports the input.
        key = node, what, number = self._stands_for[place.node]
        passed = int(place.node.attrs.get(PASSED, "0"))
        if what == "output":
            return self._report(Place(node, what, number, place.suffix), array) if place.what == what else None
        if place.what == "gradient" and place.number == passed and key in self._suffixes:
            return self._report(Place(*key, self._suffixes.pop(key)), array)
        if place.what == "input" and len(place.node.inputs) == 1:
            self._inputs[node, "input", number] = array.copy()  # MXNet may soon use its memory for another tensor
        return None

    def _report(self, place: Place, array: NDArray) -> _Report:
        """Return what a callback gets for ``place``, a tensor of the network's operators; type None is MXNet's."""
        name = self._names[place.node]
        decision = self._plan.decisions[name]
        op = None if place.what == "gradient" else decision.op
        # In emulation (float16 on a CPU) an output or a gradient is in FP32 here, before a cast rounds it.
        # In bfloat16 the operator itself makes rounded values, and its inputs were rounded by casts.
        rounded = decision.low and self._plan.policy.compute == "float16" and place.what != "input"
        rule = rule_under(self._plan.policy, decision.op)
        kept = rule.keep if place.what == "gradient" else rule.keep_outputs
        if rounded and place.number not in (None, *kept):
            array = array.astype("float16")
        return f"{name}_{place.suffix}", op, array


def _is_of_scale(place: Place) -> bool:
    """Return whether ``place`` is the gradient of the loss scale, an input of control flow with loss heads inside."""
    read = place.node.inputs if place.what == "gradient" and place.number is not None else []
    return any(entry.node.name == SCALE_NAME and position == place.number for position, entry in enumerate(read))


def place_of(nodes: Mapping[str, Node], name: str) -> Place | None:
    """Return which tensor MXNet's monitor reports under ``name``; None if no node's name and "_" begin it."""
    node, suffix = _longest(nodes, name)
    if node is None:
        return None
    output, gradient = _OUTPUT.fullmatch(suffix), _GRADIENT.fullmatch(suffix)
    if output:
        return Place(node, "output", int(output[1] or 0), suffix)
    if gradient and gradient[1]:
        return Place(node, "gradient", _ZEROS[gradient[1]], suffix)
    if gradient and gradient[3] is None:
        skipped = node.op in _WITH_CONDITION  # MXNet counts from the second input: a condition has no gradient
        return Place(node, "gradient", int(gradient[2] or 0) + skipped, suffix)
    names = _input_names(node.op, frozenset(node.attrs.items())) if gradient else []
    if gradient and gradient[3] in names:
        return Place(node, "gradient", names.index(gradient[3]), suffix)
    return Place(node, "input", _INPUTS.get(suffix), suffix)


@lru_cache(maxsize=None)
def _input_names(op: str, attrs: frozenset[tuple[str, str]]) -> list[str]:
    """Return the names of an operator's inputs, auxiliary states too, as MXNet declares them; ``[]`` if not known."""
    home, name = (mx.sym.contrib, op[len("_contrib_") :]) if op.startswith("_contrib_") else (mx.sym, op)
    if not hasattr(home, name):
        return []
    symbol = getattr(home, name)(**{key: value for key, value in attrs if not key.startswith("__")})
    return [each[len(f"{symbol.name}_") :] for each in symbol.list_inputs()]


def _longest(nodes: Mapping[str, Node], name: str) -> tuple[Node | None, str]:
    """Return the node with the longest name that begins ``name``, and the rest: ``"output0"`` of ``"fc1_output0"``."""
    parts = name.split("_")
    for end in range(len(parts) - 1, 0, -1):
        node = nodes.get("_".join(parts[:end]))
        if node is not None:
            return node, "_".join(parts[end:])
    return None, ""


def _changes(entry: Entry) -> Iterator[Node]:
    """Yield the inserted nodes that change values or shapes on the way to ``entry``, the nearest first."""
    while is_ours(entry.node) and entry.node.inputs:
        if entry.node.op not in _COPIES:
            yield entry.node
        entry = passed_on(entry)


class Listeners(GraphListener):
    """A callback for MXNet's monitor that passes each tensor on to any number of listeners."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        return True  # MXNet asks whether there is a callback

    def __reduce__(self) -> tuple:
        """Return how to copy it: as None, so that a copy of a watched block is not watched."""
        return type(None), ()

    @property
    def idle(self) -> bool:
        return not self._listeners

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        """Call all listeners; a block, not an executor, passes the operator's name before the array's handle."""
        # MXNet calls one callback, with a handle that must be freed exactly once: one NDArray for all listeners.
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)  # frees the handle
        for listener in list(self._listeners):
            listener(name.decode() if isinstance(name, bytes) else name, array)
