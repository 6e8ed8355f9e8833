"""Loss heads outside any converted block, which ignore the loss scale, by which the update would divide: refused.

Imported for a backward that reaches one, or a hybridized block that may have one inside: no operator of such a block is
recorded, but MXNet's gradient pass, of NNVM, tells which head gradients its backward reads, and a loss head reads none.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from typing import Collection, Iterable

import mxnet as mx
from mxnet.ndarray import NDArray

from ..precision.graph import Entry, Graph
from ..precision.heads import HEAD_OPERATORS, is_unscaled
from . import _mxnet
from ._mxnet import call_library
from .record import SCALED_BY_ATTRIBUTE, Record
from .scaling import converted_calls

# MXNet names an output after its operator, unless the user has named it.
_HEAD = re.compile(rf"({'|'.join(op.lower() for op in HEAD_OPERATORS)})\d*_output\d*$")
# Operators through which no gradient goes: a block that ends in one writes zeros.
_NO_GRADIENT = re.compile(
    r"(blockgrad|stop_gradient|(zeros|ones|arange)_like|arg(max|min|sort)|topk|one_hot|(equal|greater|lesser)(_?scalar)?"
    r"|logical_(and|or|xor|not)|round|rint|floor|ceil|trunc|fix|sign|multibox(prior|target|detection)|proposal|box_nms"
    r"|shape_array)\d*_output\d*$"
)


def refuse_unscaled_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if autograd recorded a loss head, such as ``MakeLoss``, that ignores the loss scale.
    Takes 0.7 ms for a ResNet-50."""
    ignoring = HEAD_OPERATORS - SCALED_BY_ATTRIBUTE
    if ignoring.isdisjoint(record.operators):
        return
    for node in record.nodes():
        if node.op in ignoring and is_unscaled(node):
            raise ValueError(
                f"{node.op} writes its own gradient and ignores the loss scale {scale:g}, by which the update "
                "would divide: put it inside a net that goes through mxmp.convert, or use loss_scale=None"
            )


def refuse_hidden_heads(record: Record, scale: float, trained: Iterable[NDArray]) -> None:
    """Raise ``ValueError`` if an unconverted hybridized block has a loss head inside, which ignores the loss scale.
    A loss head is not found if the backward reads the head gradient of another output, and the head is no output or one
    that the user has named. One that sends a gradient to none of the weights ``trained`` is no error."""
    hidden = outputs_of_cached_ops(record, known=converted_calls)
    if all(reads for outputs in hidden.values() for reads in outputs.values()):
        return
    used = _used_outputs(record)
    names_of_trained = set(map(_mxnet.recorded_name, trained))
    for node in list(record.nodes()):
        if node.name not in hidden:
            continue
        outputs = list(hidden[node.name].items())
        reached = [outputs[i] for i in range(len(outputs)) if (node.name, i) in used]
        # A loss head: an output has its name (``"softmaxoutput0_output"``) and its head gradient is not read. Or no
        # head gradient is read of the outputs that the losses depend on, and none is of an operator without a gradient.
        named = [name for name, reads in outputs if not reads and _HEAD.search(name)]
        if not named and any(reads or _NO_GRADIENT.search(name) for name, reads in reached):
            continue
        read = {each.name for each in Graph([Entry(node)]).nodes() if each.is_variable}
        if not read.isdisjoint(names_of_trained):
            names = ", ".join(name[len(node.name) + 1 :] for name in named or dict(reached))
            raise ValueError(
                f"a hybridized block (its output: {names}) ignores the gradient from above, and with it the loss "
                f"scale {scale:g}, by which the update would divide: it has a loss head inside. Convert it with "
                "mxmp.convert(block), or use loss_scale=None; if its output is to have no gradient, call the block "
                "within autograd.pause()"
            )


def _used_outputs(record: Record) -> set[tuple[str, int]]:
    """Return ``(name of the node, output index)`` for each output that gets a head gradient in a backward."""
    entries: list[Entry] = [entry for node in record.nodes() for entry in node.inputs]
    entries += [head for graph in record.graphs for head in graph.heads]
    return {(entry.node.name, entry.index) for entry in entries}


def outputs_of_cached_ops(record: Record, known: Collection[str] = ()) -> dict[str, dict[str, bool]]:
    """Map the calls of hybridized blocks but ``known``, and the outputs of each, to whether its backward reads the
    output's head gradient. Takes 0.05 ms per call. A call is missing if this is unknown: each of its inputs is passed
    more than once, or a running statistic."""
    found = {}
    for node, recorded in record.calls.items():
        if node not in known:
            try:
                outputs = _reads_head_gradients(recorded, node)
            except mx.MXNetError:  # as for an output without a gradient
                outputs = _reads_head_gradients(recorded.__copy__(), node, cut=True)
            found.update({node: outputs} if outputs else {})
    return found


def _reads_head_gradients(recorded: mx.sym.Symbol, node: str, cut: bool = False) -> dict[str, bool]:
    """Return what ``outputs_of_cached_ops`` does for one node; empty if this cannot be found out.
    With ``cut``, ``recorded`` must be a copy: variables replace the node's inputs in it."""
    inner = recorded.get_internals()
    outputs = {name: i for i, name in enumerate(inner.list_outputs()) if name.startswith(f"{node}_")}
    block = mx.sym.Group([inner[i] for i in outputs.values()])
    if cut:
        _mxnet.set_attribute(block[0], "__subgraph_name__", node)
        _cut_off_inputs(block)
    inputs = block.get_children()
    times = Counter(inputs.list_outputs())
    once = [inputs[i] for i, name in enumerate(inputs.list_outputs()) if times[name] == 1]
    if not once:
        return {}
    variables = {name: f"{name}_gradient" for name in outputs}
    heads = mx.sym.Group([mx.sym.var(name) for name in variables.values()])
    backward = _gradients(block, mx.sym.Group(once), heads)
    read = backward.get_children()
    names = set() if read is None else set(read.list_outputs())  # None: all are running statistics
    return {name: variable in names for name, variable in variables.items()} if names else {}


def _cut_off_inputs(block: mx.sym.Symbol) -> None:
    """Replace all inputs of a node by new variables, in place; only this node has its ``__subgraph_name__``."""
    inputs, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
    call_library("MXSymbolCutSubgraph", block.handle, ctypes.byref(inputs), ctypes.byref(count))
    for i in range(count.value):
        call_library("NNSymbolFree", ctypes.c_void_p(inputs[i]))


def _gradients(outputs: mx.sym.Symbol, inputs: mx.sym.Symbol, head_gradients: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the graph of the gradients of ``inputs`` by ``MXGradient``, the pass of autograd's backward.
    ``head_gradients`` has one output for each of ``outputs``. Raises ``MXNetError`` if the pass fails."""
    graph, made, symbol = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call_library("NNGraphCreate", outputs.handle, ctypes.byref(graph))
    try:
        for key, entries in ((b"grad_ys", outputs), (b"grad_xs", inputs), (b"grad_ys_out_grad", head_gradients)):
            call_library("NNGraphSetNodeEntryListAttr_", graph, key, entries.handle)
        passes = (ctypes.c_char_p * 1)(b"MXGradient")
        call_library("NNGraphApplyPasses", graph, 1, passes, ctypes.byref(made))
        call_library("NNGraphGetSymbol", made, ctypes.byref(symbol))
    finally:
        for handle in (graph, made):
            call_library("NNGraphFree", handle)
    return mx.sym.Symbol(symbol)
