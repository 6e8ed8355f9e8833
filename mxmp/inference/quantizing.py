"""INT8 by MXNet's own quantization passes and kernels."""

from __future__ import annotations

from typing import Any, Collection, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.contrib import quantization

from ..host.versions import GRAPH_ATTRIBUTES
from ..precision.graph import Entry, Graph, Node
from ..serving.folding import Params, by_kind
from ..serving.fusing import store_by_rows
from .calibration import is_usable

# From the name of a tensor to the smallest and the largest value that INT8 represents; values beyond are clipped.
Ranges = Mapping[str, Sequence[float]]
# MXNet puts this in front of the name of an operator that it replaces by an INT8 one.
QUANTIZED = "quantized_"
# The last inputs of a quantized convolution that adds a tensor are this tensor, the least and the greatest value of the
# data, and those of the tensor.
_ADDED, _ADDED_RANGE = -5, -2
# The operators that convert a tensor to INT8.
_CONVERSIONS = ("_contrib_quantize_v2", "_contrib_quantize_asym")


def tensors_to_calibrate(graph: Graph, params: Params) -> list[str]:
    """Return, sorted, the names of tensors whose ranges ``quantize`` may need, whatever it leaves out."""
    made, collector = _quantized(graph, params, (), True)
    # MXNet names what is converted to INT8 with all operators in it. What an operator in FP32 passes on to one in INT8
    # is converted where they meet, so any tensor that an operator in INT8 reads may be.
    quantized = set(_quantized_names(Graph.from_symbol(made)))
    nodes = [node for node in graph.nodes() if node.name in quantized]
    read = {entry for node in nodes for entry in _data_of(node) if entry.node.name not in params}
    return sorted({*collector.include_layer, *tensor_names(read)})


def _data_of(node: Node) -> tuple[Entry, ...]:
    """Return the inputs that are converted to INT8 with an operator: of an LSTM the first, not its states."""
    return node.inputs[:1] if node.op == "RNN" else node.inputs


def quantizable(graph: Graph, params: Params, excluded: Collection[str], *, every: bool = False) -> list[str]:
    """Return the names of the operators that ``quantize`` quantizes, without any ranges."""
    return _quantized_names(Graph.from_symbol(_quantized(graph, params, excluded, every)[0]))


def layers_at(graph: Graph, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return why not to quantize, by operator that reads or computes a tensor of ``Statistics.unusable``."""
    nodes = [node for node in graph.nodes() if not node.is_variable]
    ends = [("output", node, Entry(node)) for node in nodes]
    ends += [("input", node, entry) for node in nodes for entry in _data_of(node)]
    names = tensor_names(entry for _, _, entry in ends)
    return {
        node.name: f"its {what} {name!r} {tensors[name]} in calibration"
        for (what, node, _), name in zip(ends, names)
        if name in tensors
    }


def tensor_names(tensors: Iterable[Entry]) -> list[str]:
    """Return MXNet's names: ``"data"`` for a variable, ``"fc1_output"`` for the output of an operator."""
    found = list(tensors)
    return Graph(found, GRAPH_ATTRIBUTES).to_symbol().list_outputs() if found else []


def quantize(
    graph: Graph, params: Params, ranges: Ranges, excluded: Collection[str], *, every: bool = False
) -> tuple[Graph, Params, list[str]]:
    """Return a graph of ``fuse(..., quantizable=True)`` in INT8, its parameters, and what was quantized, by name.
    ``every`` also quantizes poolings, additions and the like that have no neighbor in INT8, and so become no faster."""
    made, collector = _quantized(graph, params, excluded, every)
    collector.min_max_dict.update(ranges)
    made, arguments, auxiliary = quantization.calib_graph(
        made, *by_kind(graph.to_symbol(), params), collector, calib_mode="naive", quantized_dtype="auto", logger=None
    )
    names = _quantized_names(Graph.from_symbol(made))
    fused, params = _fused(made), {**arguments, **auxiliary}
    # MXNet's pass for ranges has removed the copies of ``_quantized`` already, but not that of MXNet 1.8.
    fused.heads = [head.node.inputs[0] if head.node.op == "_copy" else head for head in fused.heads]
    _check_ranges(fused, params)
    _repair_relus(fused, params)
    _repair_sums(fused, params)
    store_by_rows(fused)
    return fused, params, names


def _quantized_names(graph: Graph) -> list[str]:
    """Return the names that the operators in INT8 had before MXNet quantized them."""
    return [node.name[len(QUANTIZED) :] for node in graph.nodes() if node.name.startswith(QUANTIZED)]


def _check_ranges(graph: Graph, params: Params) -> None:
    """Raise ``MXNetError`` if the range of a tensor in INT8 was not calibrated, or is not usable."""
    # A tensor without one would have that of each batch, but FullyConnected goes on with that of the first one.
    for node in graph.nodes():
        calibrated = node.op not in _CONVERSIONS or "min_calib_range" in node.attrs
        if not calibrated and node.inputs[0].node.name not in params:
            (name,) = tensor_names(node.inputs[:1])
            raise mx.MXNetError(f"{name!r} has no range for INT8: no value of it was seen in calibration")
        if "min_calib_range" in node.attrs:
            low, high = (float(node.attrs[f"{end}_calib_range"]) for end in ("min", "max"))
            if not is_usable(low, high):
                raise mx.MXNetError(f"{node.name!r} has no range for INT8: calibration saw {low:g} to {high:g}")


def _quantized(graph: Graph, params: Params, excluded: Collection[str], every: bool) -> tuple[mx.sym.Symbol, Any]:
    """Return MXNet's INT8 Symbol, in which no ranges are set yet, and MXNet's collector of ranges."""
    # MXNet's pass also quantizes operators in bfloat16, whose inputs it cannot convert, and fails for an RNN that is no
    # LSTM.
    nodes = [node for node in graph.nodes() if not node.is_variable]
    types = _types(graph, params, [Entry(node) for node in nodes])
    low = [node.name for node, dtype in zip(nodes, types) if dtype not in (np.float32, None)]
    other_rnns = [node.name for node in nodes if node.op == "RNN" and node.attrs["mode"] != "lstm"]
    # MXNet's pass takes a wrong tensor for an output of the graph that an operator in FP32 reads, too. With a copy as
    # the output it takes the right one.
    copies = [
        Entry(Node("_copy", f"{head.node.name}_head{index}", inputs=[head])) for index, head in enumerate(graph.heads)
    ]
    given = Graph(copies, graph.attrs).copy()
    hidden = {node.name: (node.op, node.attrs) for node in given.nodes() if _is_mistaken(node)}
    for node in given.nodes():
        if node.name in hidden:
            node.op, node.attrs = "add_n", {"num_args": str(len(node.inputs))}
    symbol, _, _, collector = quantization.quantize_graph(
        given.to_symbol(),
        *by_kind(graph.to_symbol(), params),
        ctx=mx.cpu(),
        excluded_sym_names=[*excluded, *low, *other_rnns],
        calib_mode="naive",
        quantized_dtype="auto",
        quantize_mode="full" if every else "smart",
        quantize_granularity="channel-wise",
        logger=None,
    )
    made = Graph.from_symbol(symbol)
    for node in made.nodes():
        node.op, node.attrs = hidden.get(node.name, (node.op, node.attrs))
    return made.to_symbol(), collector


def _is_mistaken(node: Node) -> bool:
    """Return whether MXNet takes an operator without an INT8 kernel for one that has it.
    It puts the operator itself among those in INT8: for a pooling it then crashes, for others it writes to its log."""
    if node.op == "Pooling":
        return node.attrs.get("pool_type", "max") not in ("max", "avg")
    activation = node.op == "Activation" and node.attrs["act_type"] != "relu"
    return activation or (node.op == "Concat" and int(node.attrs.get("dim", "1")) <= 0)


def _fused(symbol: mx.sym.Symbol) -> Graph:
    """Return the graph of a quantized Symbol, with conversions to FP32 moved into operators by MXNet's pass."""
    # The pass moves a _contrib_dequantize into the operator whose output it reads, and forgets other readers of it.
    graph = Graph.from_symbol(symbol)
    readers, copies = graph.consumers(), set()
    for node in list(graph.nodes()):
        if node.op == "_contrib_dequantize" and len(readers[node.inputs[0]]) > 1:
            copy = Node("BlockGrad", f"{node.name}_apart", inputs=[node.inputs[0]])
            node.rewire(0, Entry(copy))
            copies.add(copy.name)
    fused = Graph.from_symbol(graph.to_symbol().get_backend_symbol("MKLDNN_QUANTIZE"))
    for node in fused.nodes():
        node.inputs = [entry.node.inputs[0] if entry.node.name in copies else entry for entry in node.inputs]
    return fused


def _repair_relus(graph: Graph, params: Params) -> None:
    """Remove, in place, each relu that reads a uint8 tensor, which is never negative."""
    # MXNet takes the relu's result for int8, so its readers would compute with wrong values.
    for node in list(graph.nodes()):  # one after another: what follows a relu has another dtype once it is removed
        if node.op != "_contrib_quantized_act" or _types(graph, params, [node.inputs[0]]) != [np.uint8]:
            continue
        readers = graph.consumers()
        for index, source in enumerate(node.inputs):  # the tensor, its least and its greatest value
            for reader, position in readers.get(Entry(node, index), ()):
                reader.rewire(position, source)


def _repair_sums(graph: Graph, params: Params) -> None:
    """Repair, in place, convolutions that add uint8 and return int8, or the other way round."""
    # The result is written over the tensor that is added, in its dtype, even if MXNet infers the other one
    # (src/operator/subgraph/mkldnn/mkldnn_conv.cc).
    sums = [
        node
        for node in graph.nodes()
        if node.op == "_sg_mkldnn_conv" and {"quantized", "with_sum"} <= node.attrs.keys()  # written only where true
    ]
    added_types = _types(graph, params, [node.inputs[_ADDED] for node in sums])
    output_types = _types(graph, params, [Entry(node) for node in sums])
    for node, added, output in zip(sums, added_types, output_types):
        if added == np.int8 and output == np.uint8:
            # MXNet would cut off values at half their range.
            # Where the largest value is to be 255, int8 ends at half of it; where twice that is, int8 ends at it.
            node.attrs["max_calib_range"] = repr(2 * float(node.attrs["max_calib_range"]))
        elif added == np.uint8 and output == np.int8:  # negative values would become 0
            signed, *ends = _signed(node.inputs[_ADDED].node)
            node.rewire(_ADDED, signed)
            node.inputs = (*node.inputs[:_ADDED_RANGE], *ends)


def _signed(node: Node) -> list[Entry]:
    """Return a node's output as int8 in a range symmetric around 0, its least and its greatest value; all new."""
    exact = Node("_contrib_dequantize", f"{node.name}_exact", inputs=[Entry(node, index) for index in range(3)])
    top = repr(_largest(node))
    attrs = {"out_type": "int8", "min_calib_range": f"-{top}", "max_calib_range": top}
    signed = Node("_contrib_quantize_v2", f"{node.name}_signed", attrs, [Entry(exact)])
    return [Entry(signed, index) for index in range(3)]


def _largest(node: Node) -> float:
    """Return the largest value of a node's output by calibration; without a range of its own, that of its inputs."""
    if "max_calib_range" in node.attrs:
        return float(node.attrs["max_calib_range"])
    return max(_largest(entry.node) for entry in node.inputs if not entry.index and not entry.node.is_variable)


def _types(graph: Graph, params: Params, tensors: list[Entry]) -> list[type | None]:
    """Return the dtypes of ``tensors`` where inputs are FP32; None for each if MXNet cannot infer them."""
    if not tensors:
        return []
    symbol = Graph(tensors, graph.attrs).to_symbol()
    known = {name: params[name].dtype if name in params else np.float32 for name in symbol.list_arguments()}
    try:
        return symbol.infer_type(**known)[1]
    except mx.MXNetError:
        return [None] * len(tensors)
