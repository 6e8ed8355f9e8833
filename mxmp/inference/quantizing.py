"""INT8 by MXNet's own quantization passes and kernels."""

from __future__ import annotations

from typing import Any, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.contrib import quantization

from ..precision.graph import Graph
from ..serving.folding import Params

__all__ = ["QUANTIZED", "Ranges", "quantize", "tensors_to_calibrate"]

# From the name of a tensor to the smallest and the largest value that INT8 represents; values beyond are clipped.
Ranges = Mapping[str, Sequence[float]]
# MXNet puts this in front of the name of an operator that it replaces by an INT8 one.
QUANTIZED = "quantized_"


class _KnownRanges:
    """A collector for MXNet's quantization that has all ranges beforehand, since mxmp has calibrated them itself.

    MXNet reads the attribute ``min_max_dict``, from the names of tensors to their ranges.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.min_max_dict = dict(ranges)

    def collect(self, name: str, array: object) -> None:
        """Do nothing: MXNet requires a collector to have this method, but the ranges are known already."""


def tensors_to_calibrate(graph: Graph, params: Params) -> list[str]:
    """Return, sorted, the names of all tensors whose ranges ``quantize`` may need for a graph.

    They are outputs of operators, such as ``"fc1_output"``, and inputs of the graph, such as ``"data"``, and suffice
    whichever operators ``quantize`` leaves out. ``graph`` comes from ``fuse(..., quantizable=True)``.
    """
    return sorted(set(_quantized(graph, params, (), True, "naive", None)[1].include_layer))


def quantize(
    graph: Graph, params: Params, ranges: Ranges, excluded: Collection[str], *, every: bool = False
) -> tuple[Graph, Params, list[str]]:
    """Quantize a graph to INT8 by MXNet's own passes.

    Parameters
    ----------
    graph : Graph
        In FP32 or partly bfloat16, from ``fuse(..., quantizable=True)``.
    params : dict of str to NDArray
        The parameters of the graph by name.
    ranges : mapping of str to (smallest, largest)
        The range of values that INT8 represents, for each tensor that ``tensors_to_calibrate`` names.
    excluded : collection of str
        Names of operators that keep their dtype.
    every : bool
        True also quantizes operators such as poolings and additions if none of their neighbors is in INT8, though this
        makes them no faster.

    Returns
    -------
    Graph
        The quantized graph, of new nodes.
    dict of str to NDArray
        Its parameters by name, with weights in INT8.
    list of str
        The names in ``graph`` of the operators that compute in INT8, in graph order.

    Raises
    ------
    mxnet.MXNetError
        MXNet's pass fails.
    """
    made, collector = _quantized(graph, params, excluded, every, "customize", _KnownRanges(ranges))
    made, arguments, auxiliary = quantization.calib_graph(
        made, *_by_kind(graph, params), collector, calib_mode="customize", quantized_dtype="auto", logger=None
    )
    names = [node.name[len(QUANTIZED) :] for node in Graph.from_symbol(made).nodes() if node.name.startswith(QUANTIZED)]
    return Graph.from_symbol(made.get_backend_symbol("MKLDNN_QUANTIZE")), {**arguments, **auxiliary}, names


def _quantized(
    graph: Graph, params: Params, excluded: Collection[str], every: bool, mode: str, collector: Any
) -> tuple[mx.sym.Symbol, Any]:
    """Return MXNet's INT8 Symbol for a graph, before the ranges are set in it, and a collector of ranges.

    ``excluded`` are names of operators that keep their dtype; ``every`` also quantizes those without a neighbor in
    INT8. ``mode`` is MXNet's ``calib_mode``. With ``"naive"`` the returned collector is a new one, whose
    ``include_layer`` names the tensors that need ranges. With ``"customize"`` it is ``collector``, which then has the
    ranges.
    """
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
