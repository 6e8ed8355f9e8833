"""INT8 by MXNet's own quantization passes and kernels."""

from __future__ import annotations

from typing import Any, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.contrib import quantization

from ..precision.graph import Graph
from .folding import Params

__all__ = ["QUANTIZED", "Ranges", "quantize", "tensors_to_calibrate"]

# By the name of a tensor, the smallest and the largest value that INT8 has to hold.
Ranges = Mapping[str, Sequence[float]]
# What the name of an operator in INT8 begins with.
QUANTIZED = "quantized_"


class _Collected:
    """What MXNet takes for a collector of ranges: one that has collected already."""

    def __init__(self, ranges: Ranges) -> None:
        self.min_max_dict = dict(ranges)

    def collect(self, name: str, array: object) -> None:
        pass


def tensors_to_calibrate(graph: Graph, params: Params) -> list[str]:
    """Return the tensors whose ranges ``quantize`` needs, whatever is excluded: ``NAME_output``, and inputs."""
    return sorted(set(_pass(graph, params, (), True, "naive", None)[1].include_layer))


def quantize(
    graph: Graph, params: Params, ranges: Ranges, excluded: Collection[str], *, every: bool = False
) -> tuple[Graph, Params, list[str]]:
    """Return the graph in INT8, its parameters, and the names of the operators that compute in INT8, in graph order.

    Parameters
    ----------
    graph : Graph
        Fused, ``quantizable``.
    ranges : mapping of str to (smallest, largest)
        Of the output ``NAME_output`` of each operator, and of inputs by their names.
    excluded : collection of str
        Operators that stay as they are.
    every : bool
        Quantize also what gains nothing by itself (pooling, additions), where no layer in INT8 is its neighbour.

    Raises
    ------
    mxnet.MXNetError
        MXNet's pass fails.
    """
    made, collector = _pass(graph, params, excluded, every, "customize", _Collected(ranges))
    made, arguments, auxiliary = quantization.calib_graph(
        made, *_by_kind(graph, params), collector, calib_mode="customize", quantized_dtype="auto", logger=None
    )
    names = [node.name[len(QUANTIZED) :] for node in Graph.from_symbol(made).nodes() if node.name.startswith(QUANTIZED)]
    return Graph.from_symbol(made.get_backend_symbol("MKLDNN_QUANTIZE")), {**arguments, **auxiliary}, names


def _pass(graph: Graph, params: Params, excluded: Collection[str], every: bool, mode: str, collector: Any) -> tuple:
    made, _, _, collector = quantization.quantize_graph(
        graph.to_symbol(),
        *_by_kind(graph, params),
        ctx=mx.cpu(),
        excluded_sym_names=list(excluded),
        calib_mode=mode,
        quantized_dtype="auto",
        quantize_mode="full" if every else "smart",
        quantize_granularity="channel-wise",
        LayerOutputCollector=collector,
        logger=None,
    )
    return made, collector


def _by_kind(graph: Graph, params: Params) -> tuple[Params, Params]:
    states = set(graph.to_symbol().list_auxiliary_states())
    arguments = {name: value for name, value in params.items() if name not in states}
    return arguments, {name: value for name, value in params.items() if name in states}
