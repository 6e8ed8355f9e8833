"""Inserts the casts of a plan into a graph, and removes again all that mxmp inserted."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Collection, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx

from .graph import TYPE_CODES, Entry, Graph, Node, Reader, inferred
from .plan import FULL, PlannedGraph
from .rule import Rule
from .subgraphs import Body, bodies, set_bodies

# Operators whose code is Python.
IN_PYTHON = ("Custom", "_NDArray", "_Native")
# The attribute that marks a node that mxmp inserted: "cast", or "head" where the node is a graph output and has the
# name of the network's operator that it follows. MXNet keeps attributes of the form __name__ on any operator.
MARK = "__mxmp__"
# On an inserted node: the position of the input whose values it passes on, where that is not 0 (``where``, which
# selects between the network's tensor and zeros); "each" where output i passes on input i (``amp_multicast``).
PASSED = "__mxmp_passed__"
# On an inserted node that must stay apart from an equal one: a text that the other does not have, because MXNet merges
# nodes with equal inputs and attributes (MXNET_ELIMINATE_COMMON_EXPR).
APART = "__mxmp_apart__"
# What ``strip`` restores: a variable's declared dtype; the operator and attributes of a node of the network.
_STORED = "__mxmp_stored__"
_REPLACED = "__mxmp_replaced__"
# The attribute by which a user says which axis of an output is the batch ("TNC"): Module splits and joins along it.
_LAYOUT = "__layout__"
# A ``grad_req`` by which no variable's requested gradient is known: every workaround that any request would need is
# applied.
UNKNOWN: Mapping[str, Any] = MappingProxyType({})


# MXNet adds the gradients of a tensor's readers in place if there are MXNET_EXEC_INPLACE_GRAD_SUM_CAP (8) or more
# (src/executor/graph_executor.cc: AggregateGradient). On a CPU half of it, to be safe; on a GPU that would
# copy an Inception's feature maps.
_ADDED_IN_PLACE = {"cpu": 4, "gpu": 8}


class InsertedCast(NamedTuple):
    """What a cast reads, and the dtype that it returns."""

    tensor: Entry  # of the FP32 graph
    name: str  # of the tensor in the graph with casts: "fc", or "split[1]" for the second output of "split"
    dtype: str


@dataclass
class LowGraph:
    """The graph that runs for an FP32 graph and its plan, with casts; workarounds rewrite ``graph`` in place."""

    planned: PlannedGraph
    graph: Graph
    casts: dict[Node, InsertedCast]  # as inserted: one that a workaround removes from ``graph`` is still here
    low: dict[Node, Rule]  # without those in bodies of control flow
    source: dict[Node, Node]  # from a copy in ``graph`` to its original in the FP32 graph
    grad_req: Mapping[str, str]  # "write", "add" or "null" by the name of a variable; a missing one may have any
    compute: str  # the compute dtype
    has_gradients: bool  # a backward may run: a requested gradient that is not known counts
    large_inputs: bool  # it runs without gradients, or never with data that are small beside the padding (LargeInputs)
    workarounds: dict[str, list[Node]] = field(default_factory=dict)  # from a name to what it rewrote
    # By control-flow operator of the FP32 graph; empty until ``pipeline.emitted`` fills it.
    bodies: dict[Node, list[tuple[Body, LowGraph]]] = field(default_factory=dict)
    # In emulated float16: the casts that round the outputs of each low-precision operator, and those to FP32 that such
    # operators read.
    roundings: dict[Node, list[Node]] = field(default_factory=dict)
    widenings: set[Node] = field(default_factory=set)

    @property
    def casts_left(self) -> list[InsertedCast]:
        """Return the casts without those that a workaround removed: a kernel of the device casts inside."""
        there = set(self.graph.nodes())
        return [cast for node, cast in self.casts.items() if node in there]

    def may_be_added_to(self, entry: Entry, readers: int) -> bool:
        """Return whether MXNet may add one reader's gradient of ``entry`` to what its array holds already."""
        requested = self.grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
        return requested == "add" or readers >= _ADDED_IN_PLACE[self.planned.plan.device]


def insert_casts(
    planned: PlannedGraph, grad_req: Mapping[str, str] = UNKNOWN, *, large_inputs: bool = False
) -> LowGraph:
    """Return a copy of the FP32 graph of ``planned`` with its casts; bodies are left to ``pipeline.emitted``."""
    graph, policy = planned.graph, planned.policy
    new: dict[Node, Node] = {}
    casts: dict[tuple[Entry, str], Entry] = {}

    def copied(entry: Entry) -> Entry:
        return Entry(new[entry.node], entry.index, entry.version)

    def cast(entry: Entry, dtype: str) -> Entry:
        key = (entry, dtype)
        if key not in casts:
            suffix = f"_{entry.index}" if entry.index else ""
            casts[key] = inserted("Cast", f"{entry.node.name}{suffix}_to_{dtype}", [copied(entry)], dtype=dtype)
        return casts[key]

    def read(node: Node, position: int) -> Entry:
        dtype = cast_to(planned, node, position)
        return cast(node.inputs[position], dtype) if dtype else copied(node.inputs[position])

    def output(entry: Entry) -> Entry:
        if policy.output != FULL or not planned.is_low(entry):
            return copied(entry)
        made = cast(entry, FULL)
        _take_layout(made.node, entry.node)
        # The output is still "fc_output": the cast is now "fc", and the operator "fc_bfloat16". Of an operator with
        # several outputs, the cast ones get new names: "split_1_to_float32_output" for "split_output1".
        if entry.index == 0 and not entry.node.is_variable:
            _take_name(made.node, new[entry.node], policy.compute)
        return made

    for node in graph.nodes():
        new[node] = _copy(node, [read(node, position) for position in range(len(node.inputs))], new)
        if not node.is_variable and planned.reads_fp32(node):
            replace_operator(new[node], node.op, **{**node.attrs, "dtype": policy.compute})
        if node in planned.low_variables:
            _declare_dtype(new[node], policy.compute)
    heads = [output(entry) for entry in graph.heads]
    return LowGraph(
        planned,
        Graph(heads, graph.attrs, numpy=graph.numpy),
        {
            made.node: InsertedCast(entry, new[entry.node].name + (f"[{entry.index}]" if entry.index else ""), dtype)
            for (entry, dtype), made in casts.items()
        },
        {new[node]: planned.rules[node] for node, decision in planned.decisions.items() if decision.low},
        {copy: node for node, copy in new.items()},
        grad_req,
        policy.compute,
        any(grad_req.get(node.name, "write") != "null" for node in graph.nodes() if node.is_variable),
        large_inputs,
    )


def cast_to(planned: PlannedGraph, node: Node, position: int) -> str | None:
    """Return the dtype to which ``node`` needs a cast of its input at ``position``; None if it needs none."""
    low = planned.wants_low(node, position)
    if low == planned.is_low(node.inputs[position]):
        return None
    return planned.policy.compute if low else FULL


def widen_inputs(graph: Graph, names: Collection[str]) -> None:
    """Let all operators, mxmp's casts too, read FP32 copies of these inputs, which are float16 themselves, in place.
    Not those in Python, which say themselves what they take."""
    readers = graph.consumers()
    for node in graph.nodes():
        if node.is_variable and node.name in names:
            wide = inserted("Cast", f"{node.name}_widened", [Entry(node)], dtype=FULL)
            for reader, position in readers.get(Entry(node), ()):
                if reader.op not in IN_PYTHON:
                    reader.rewire(position, wide)


def copy_returned_inputs(graph: Graph) -> None:
    """Let ``graph`` return copies where it returns inputs or Parameters as they are, in place."""
    # MXNet's CachedOp takes such an output and the variable for one array: the gradient of the output is lost, and with
    # control dependencies (``write_gradients_early``) the backward may fail. oneDNN's Deconvolution changes its weight
    # for as long as it runs, and who reads it as an output does not wait for that.
    for position, head in enumerate(graph.heads):
        if head.node.is_variable:
            graph.heads[position] = inserted("_copy", f"{head.node.name}_returned", [head])


def is_ours(node: Node) -> bool:
    """Return whether ``insert_casts`` or a workaround inserted ``node``; False for the nodes of ``scale_heads``."""
    return MARK in node.attrs


def inserted(op: str, name: str, inputs: Iterable[Entry] = (), **attrs: object) -> Entry:
    """Return the first output of a new node of mxmp's, which ``strip`` removes; ``attrs`` become texts."""
    return Entry(Node(op, name, {**{key: str(value) for key, value in attrs.items()}, MARK: "cast"}, list(inputs)))


def casts_to(node: Node, dtype: str) -> bool:
    """Return whether ``node`` is a ``Cast`` of mxmp's to ``dtype``; False for an ``amp_cast``, as bfloat16 gets it."""
    return is_ours(node) and node.op == "Cast" and node.attrs["dtype"] == dtype


def skip_casts(node: Node, readers: Mapping[Entry, Sequence[Reader]]) -> None:
    """Let the readers of all casts of the first output of ``node`` read this output itself, in place.
    Nothing but casts may read it. ``readers`` is ``consumers()`` of the graph, before this change."""
    for cast, _ in readers.get(Entry(node), ()):
        for user, position in readers[Entry(cast)]:
            user.rewire(position, Entry(node))


def source_of(entry: Entry) -> Entry:
    """Return the network's own tensor that inserted nodes pass on as ``entry``; for a cast, what it casts."""
    while is_ours(entry.node) and entry.node.inputs:
        entry = passed_on(entry)
    return entry


def strip(graph: Graph) -> Graph:
    """Return a copy without the casts and workarounds of mxmp, in bodies too; nodes of ``scale_heads`` stay."""
    new: dict[Node, Node] = {}
    renamed: dict[Node, str] = {}

    def original(entry: Entry) -> Entry:
        # An inserted node that makes an output of the graph has the name of the network's operator, which gets it back.
        name = None
        while is_ours(entry.node):
            if entry.node.attrs[MARK] == "head":
                name = name or entry.node.name
            entry = passed_on(entry)
        if name:
            renamed[entry.node] = name
        return Entry(new[entry.node], entry.index, entry.version)

    for node in graph.nodes():
        if not is_ours(node):
            new[node] = _copy(node, [original(e) for e in node.inputs], new)
            _restore_dtype(new[node])
            _restore_operator(new[node])
            if node.subgraphs:
                set_bodies(new[node], [strip(body.graph) for body in bodies(node)])
    heads = [original(e) for e in graph.heads]
    for node, name in renamed.items():
        new[node].name = name
    return Graph(heads, graph.attrs, numpy=graph.numpy)


def replace_operator(node: Node, op: str, **attrs: str) -> None:
    """Turn the network's ``node`` into an ``op`` with only the parameters ``attrs``; ``strip`` undoes this."""
    hidden = {name: value for name, value in node.attrs.items() if _is_hidden(name)}
    node.attrs = {**hidden, **attrs, _REPLACED: json.dumps([node.op, node.attrs])}
    node.op = op


def replace_heads(graph: Graph, made: Mapping[Node, Entry]) -> None:
    """Replace outputs of ``graph``, in place: ``made`` maps an operator to what replaces its first output."""
    for position, head in enumerate(graph.heads):
        if head.index == 0 and head.node in made:
            _take_layout(made[head.node].node, head.node)
            _take_name(made[head.node].node, head.node, "inner")
            graph.heads[position] = made[head.node]


def _take_name(ours: Node, source: Node, suffix: str) -> None:
    # MXNet names a graph output by the node that makes it, and that is ``ours`` now.
    if ours.attrs[MARK] != "head":
        ours.attrs[MARK] = "head"
        ours.name, source.name = source.name, f"{source.name}_{suffix}"


def _take_layout(ours: Node, source: Node) -> None:
    # Module reads it from the node that makes a graph output.
    if _LAYOUT in source.attrs:
        ours.attrs[_LAYOUT] = source.attrs[_LAYOUT]


def declare_full(graph: Graph, given: Mapping[str, Any] | None = None) -> None:
    """Declare as FP32, in place, each variable whose dtype MXNet cannot infer because of what mxmp inserted.
    ``given`` has the dtypes of data and labels by name; None if they are not known."""
    nodes = graph.nodes()
    # MXNet infers a weight's dtype from the operator that reads it, but not through a cast. Without the declaration,
    # bind fails if the caller gives dtypes of some inputs only, as Module does. What the caller gives overrules it.
    cut: set[Node] = set()  # what inserted nodes read, also through operators, in a body of control flow too
    for node in reversed(nodes):
        if node in cut or is_ours(node) or node.subgraphs:
            cut.update(entry.node for entry in node.inputs)
    known = set(given or ())
    # The dtypes of a Custom operator come from the user's code, which may not know what to do with None.
    if given is not None or all(node.op != "Custom" for node in nodes):
        symbol = graph.to_symbol()
        own = {name: given[name] for name in symbol.list_arguments() if name in given} if given else {}
        with suppress(mx.MXNetError):  # an operator, such as Dropout, asks for the dtype of what it reads: declare all
            dtypes = inferred(symbol, symbol.infer_type_partial, own)
            known |= {name for name, dtype in dtypes.items() if dtype is not None}
    for node in cut:
        if node.is_variable and "__dtype__" not in node.attrs and node.name not in known:
            _declare_dtype(node, FULL)


def _copy(node: Node, inputs: list[Entry], new: dict[Node, Node]) -> Node:
    """Return a copy that reads ``inputs``; ``new`` has the copies of the nodes on whose control it depends."""
    return Node(node.op, node.name, dict(node.attrs), inputs, [new[n] for n in node.control_deps], node.subgraphs)


def passed_on(entry: Entry) -> Entry:
    """Return the input that an inserted node passes on as ``entry``, perhaps rounded, padded or cropped."""
    position = entry.node.attrs.get(PASSED, "0")
    return entry.node.inputs[entry.index if position == "each" else int(position)]


def _declare_dtype(variable: Node, dtype: str) -> None:
    variable.attrs[_STORED] = variable.attrs.get("__dtype__", "")
    variable.attrs["__dtype__"] = TYPE_CODES[dtype]


def _restore_dtype(node: Node) -> None:
    if _STORED in node.attrs:
        before = node.attrs.pop(_STORED)
        del node.attrs["__dtype__"]
        if before:
            node.attrs["__dtype__"] = before


def _restore_operator(node: Node) -> None:
    if _REPLACED in node.attrs:
        node.op, before = json.loads(node.attrs.pop(_REPLACED))
        node.attrs = {**before, **{name: value for name, value in node.attrs.items() if _is_hidden(name)}}


def _is_hidden(attr: str) -> bool:
    """Return whether any node may have ``attr`` (``"__dtype__"``), so that it is no operator's parameter."""
    return attr.startswith("__")
