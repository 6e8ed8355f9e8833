"""Rewrites of an FP32 graph for inference: BatchNorm becomes part of weights, constants are computed once."""

from __future__ import annotations

from typing import Dict, Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..precision._mxnet import dtype_name
from ..precision.casts import is_ours
from ..precision.graph import TYPE_CODES, Entry, Graph, Node
from ..precision.missing_kernels import is_true

# Parameters and running statistics together, by the name of their variable.
Params = Dict[str, NDArray]

_NORMS = ("BatchNorm", "_contrib_SyncBatchNorm")
# Operators that only move values, and return no more of them than they read.
_MOVES = frozenset(
    [
        *("Concat", "Flatten", "Reshape", "SliceChannel", "SwapAxis", "_copy", "_rnn_param_concat", "_split_v2"),
        *("expand_dims", "reverse", "slice", "slice_axis", "squeeze", "stack", "transpose"),
        *("_np_copy", "_np_moveaxis", "_np_reshape", "_np_squeeze", "_np_transpose", "_npx_reshape"),
        *("_npi_concatenate", "_npi_flip", "_npi_stack"),
    ]
)


def by_kind(symbol: mx.sym.Symbol, params: Params) -> tuple[Params, Params]:
    """Return ``params`` in two dicts: all others, and the auxiliary states of a Symbol."""
    states = set(symbol.list_auxiliary_states())
    arguments = {name: value for name, value in params.items() if name not in states}
    return arguments, {name: value for name, value in params.items() if name in states}


def copied(graph: Graph) -> Graph:
    """Return a copy, of new nodes; operators that share a name get unique names, ``fc`` and ``fc:1``."""
    copy = graph.copy()
    for node, name in copy.names().items():
        if not node.is_variable:
            node.name = name
    return copy


def without_identities(graph: Graph) -> Graph:
    """Return a copy without Dropout, ``_copy`` and ``BlockGrad``, which in inference only copy their input."""
    copy = copied(graph)
    heads = {head.node for head in copy.heads}
    for node in copy.nodes():
        node.inputs = [_source(entry, heads) for entry in node.inputs]
    for node in filter(_is_identity, heads):  # an output keeps its name; MXNet's fusion leaves BlockGrad alone
        node.op, node.attrs = "BlockGrad", {}
    return copy


def _source(entry: Entry, heads: set[Node]) -> Entry:
    """Return the tensor of which ``entry`` is a copy in inference; an output of ``heads`` counts as no copy."""
    while entry.node not in heads and _is_identity(entry.node):
        entry = entry.node.inputs[0]
    return entry


def _is_identity(node: Node) -> bool:
    if node.op == "Dropout":
        return node.attrs.get("mode", "training") == "training"
    return node.op in ("_copy", "BlockGrad")


def folded_norms(graph: Graph, params: Params) -> tuple[Graph, Params]:
    """Return a copy, and its parameters, without BatchNorms that can be folded, and without what is constant then."""
    return fold_constants(*fold_norms(graph, params))


def fold_norms(graph: Graph, params: Params) -> tuple[Graph, Params]:
    """Return a copy, and its parameters, in which BatchNorms are folded into the layers before them, where possible."""
    copy, values = copied(graph), dict(params)
    readers = dict(copy.consumers())
    heads = set(copy.heads)
    for norm in [node for node in copy.nodes() if node.op in _NORMS]:
        layer = norm.inputs[0].node
        if not _folds(norm, layer, readers, heads, values):
            continue
        values.update(_fold(norm, layer, values))
        users = readers.get(Entry(norm), [])
        for user, position in users:
            user.rewire(position, Entry(layer))
        if Entry(norm) in heads:  # the output keeps its name, and the layer its own, by which plans and policies go
            norm.op, norm.attrs, norm.inputs = "BlockGrad", {}, (Entry(layer),)
            users = [*users, (norm, 0)]
        readers[Entry(layer)] = users
    names = {node.name for node in copy.nodes() if node.is_variable}
    return copy, {name: value for name, value in values.items() if name in names}


def _folds(norm: Node, layer: Node, readers: Mapping, heads: set[Entry], values: Params) -> bool:
    """Return whether ``norm``, a BatchNorm, can be folded into ``layer``, the operator that it alone reads."""
    channels_first = layer.attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW")
    is_layer = (layer.op == "Convolution" and channels_first) or (
        layer.op == "FullyConnected" and is_true(layer.attrs.get("flatten", "True"))
    )
    parameters = [*norm.inputs[1:], *layer.inputs[1:]]
    return (
        is_layer
        and norm.attrs.get("axis", "1") == "1"
        and not any(Entry(norm, index) in readers or Entry(norm, index) in heads for index in (1, 2))
        and len(readers[norm.inputs[0]]) == 1
        and norm.inputs[0] not in heads
        and all(entry.node.name in values for entry in parameters)
        and not any(entry in heads for entry in parameters)
    )


def _fold(norm: Node, layer: Node, values: Params) -> Params:
    """Let ``layer`` compute, in place, what ``norm`` returns; return its new weight and bias by name."""
    gamma, beta, mean, variance = (values[entry.node.name].asnumpy().astype("float64") for entry in norm.inputs[1:5])
    if is_true(norm.attrs.get("fix_gamma", "True")):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(norm.attrs.get("eps", "0.001")))
    weight, *bias = (values[entry.node.name].asnumpy().astype("float64") for entry in layer.inputs[1:])
    made = {
        f"{layer.name}_folded_weight": weight * scale.reshape((-1,) + (1,) * (weight.ndim - 1)),
        f"{layer.name}_folded_bias": beta + ((bias[0] if bias else 0.0) - mean) * scale,
    }
    layer.inputs = (layer.inputs[0], *(Entry(Node("null", name)) for name in made))
    layer.attrs["no_bias"] = "False"
    return {name: mx.nd.array(value, dtype="float32") for name, value in made.items()}


def fold_constants(graph: Graph, params: Params) -> tuple[Graph, Params]:
    """Return a copy in which operators on parameters alone are computed once, on the CPU, and its parameters.
    Computed are those that mxmp inserted, such as casts of weights, and those that only move values."""
    copy = copied(graph)
    constant: set[Node] = set()
    made: dict[Entry, list[tuple[Node, int]]] = {}
    for node in copy.nodes():
        if node.is_variable:
            if node.name in params:
                constant.add(node)
        elif (is_ours(node) or node.op in _MOVES) and node.inputs and all(e.node in constant for e in node.inputs):
            constant.add(node)
    for entry, users in copy.consumers().items():
        if entry.node in constant and not entry.node.is_variable:
            readers = [(user, position) for user, position in users if user not in constant]
            if readers:
                made[entry] = readers
    if not made:  # as where only outputs of the graph depend on them
        return copy, dict(params)
    symbol = Graph(list(made), copy.attrs).to_symbol()
    with autograd.pause(train_mode=False):
        # Not an executor, for which MXNet logs a line each time that it might fuse.
        results = mx.nd.CachedOp(symbol)(*(params[name] for name in symbol.list_inputs()))
    values, taken = dict(params), {node.name for node in copy.nodes()}
    for (entry, readers), value in zip(made.items(), results if isinstance(results, list) else [results]):
        # MXNet cannot infer the shape of an input that is broadcast from the operator that reads it.
        attrs = {"__dtype__": TYPE_CODES[dtype_name(value.dtype)], "__shape__": str(value.shape)}
        name = f"{entry.node.name}_{entry.index}"
        while name in taken:
            name += "_constant"
        taken.add(name)
        variable = Node("null", name, attrs)
        values[variable.name] = value.copy()
        for user, position in readers:
            user.rewire(position, Entry(variable))
    names = {node.name for node in copy.nodes() if node.is_variable}
    return copy, {name: value for name, value in values.items() if name in names}
