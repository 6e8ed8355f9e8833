"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import MappingProxyType
from typing import Mapping

import mxnet as mx

from .casts import APART, MARK, CastGraph, is_ours
from .emulation import emulate
from .graph import Entry, Graph, Node
from .onednn import (
    blocked_grouped_convolutions,
    bound_in_two,
    plain_grouped_weights,
    plain_volume_norms,
    plain_volumes,
    round_bfloat16,
)
from .padding import pad_volumes, select_seen_taps
from .unwritten import ask_for_weight_gradients, zero_unassigned_rois

__all__ = ["UNKNOWN", "device_of", "fit_to_device"]

# Nobody knows what is asked of any variable's gradient.
UNKNOWN: Mapping[str, str] = MappingProxyType({})


def device_of(ctx: mx.Context | None) -> str:
    """``"gpu"`` or ``"cpu"``: whose kernels a graph on ``ctx`` (default: the current context) meets."""
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def fit_to_device(
    casted: CastGraph, device: str, grad_req: Mapping[str, str] = UNKNOWN, *, large_inputs: bool = False
) -> Graph:
    """The graph that runs on ``device``; takes ``casted`` over.

    ``grad_req``: what is asked of the gradients of variables, by name; of others it may be anything.
    ``large_inputs``: it will run only where ``LargeInputs`` says so.

    - float16 on a GPU: as it is; every low-precision node is a native kernel.
    - bfloat16 on a CPU: casts become ``amp_cast``, which oneDNN does; ``Cast`` truncates to bfloat16
      instead of rounding, and is slower. Operators that truncate too are computed by others that round,
      FP32's slow ``clip`` by two that are fast, and layouts are kept from kernels that are slow in them.
    - float16 on a CPU: emulated.
    """
    if device == "gpu":
        return casted.graph
    if casted.compute == "bfloat16":
        if casted.low:
            _warn_of_slow_bfloat16()
        for node in casted.graph.nodes():
            if is_ours(node):
                node.op = "amp_cast"
        round_bfloat16(casted.low)
        bound_in_two(node for node in casted.source if node not in casted.low)
        _split_shared_casts(casted.graph)
        plain_grouped_weights(casted.graph)
        blocked_grouped_convolutions(casted.graph, casted.low)
        if not large_inputs:
            select_seen_taps(casted.graph)
        _copy_before_casts(casted.graph, grad_req)
        plain_volumes(casted.graph)
    else:
        emulate(casted)
    if not large_inputs:
        pad_volumes(casted.graph)
    plain_volume_norms(casted.graph)
    zero_unassigned_rois(casted.graph)
    ask_for_weight_gradients(casted.graph, grad_req)
    return casted.graph


# A sum of 4 bfloat16 gradients is off by at most 3 roundings; one of 1,000 equal ones stops at 256.
_SUMMED_LOW = 4
# Half of MXNET_EXEC_INPLACE_GRAD_SUM_CAP, from which on MXNet adds gradients in place.
_ADDED_IN_PLACE = 4


def _split_shared_casts(graph: Graph) -> None:
    """Another cast of a variable for every fourth of its readers, in place.

    MXNet sums the gradients of a tensor's readers in its dtype: those of one cast in bfloat16, those of several
    casts in FP32. A weight of an unrolled recurrent network has as many readers as there are steps.
    """
    for entry, users in graph.consumers().items():
        cast = entry.node
        if is_ours(cast) and cast.inputs and cast.inputs[0].node.is_variable:
            for number, (node, position) in enumerate(users[_SUMMED_LOW:]):
                if number % _SUMMED_LOW == 0:
                    name = f"{cast.name}_{number // _SUMMED_LOW + 1}"
                    attrs = {**cast.attrs, APART: name}
                    entry = Entry(Node(cast.op, name, attrs, list(cast.inputs)))
                node.inputs[position] = entry


def _copy_before_casts(graph: Graph, grad_req: Mapping[str, str]) -> None:
    """A copy between a tensor whose gradient is added to what is there and its casts, in place.

    oneDNN's backward of ``amp_cast`` ignores "add" and leaves the gradient as it was. The copy's does not; it
    costs about 0.4 ns per element, forward and backward, so only those that need it pay: variables with
    ``grad_req="add"``, and what many read, where MXNet adds the gradients one by one in place.
    """
    readers = graph.consumers()
    copies: dict[tuple[Entry, str], Entry] = {}
    for node in list(graph.nodes()):
        if node.op == "amp_cast" and is_ours(node):
            entry = node.inputs[0]
            asked = grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
            if asked == "add" or len(readers[entry]) >= _ADDED_IN_PLACE:
                key = (entry, node.attrs.get(APART, ""))
                if key not in copies:
                    attrs = {name: value for name, value in node.attrs.items() if name == APART}
                    suffix = f"_{entry.index}" if entry.index else ""
                    name = f"{entry.node.name}{suffix}_accumulated"
                    copies[key] = Entry(Node("_copy", name, {**attrs, MARK: "cast"}, [entry]))
                node.inputs[0] = copies[key]


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> None:
    """Once: without its instructions oneDNN emulates bfloat16 in FP32 ones."""
    try:
        with open(cpuinfo) as file:
            known = file.read()
    except OSError:
        return
    if "flags" in known and not ("avx512_bf16" in known or "amx_bf16" in known):
        warnings.warn(
            "this CPU has neither AVX512-BF16 nor AMX, so bfloat16 is emulated: expect no gain over FP32",
            stacklevel=4,
        )
