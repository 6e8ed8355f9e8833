"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import MappingProxyType
from typing import Mapping

import mxnet as mx

from .casts import MARK, CastGraph, is_ours
from .emulation import emulate
from .graph import Entry, Graph, Node
from .onednn import ask_for_weight_gradients, plain_grouped_weights, plain_volumes, round_bfloat16
from .padding import select_seen_taps

__all__ = ["UNKNOWN", "device_of", "fit_to_device"]

# Nobody knows what is asked of any variable's gradient.
UNKNOWN: Mapping[str, str] = MappingProxyType({})


def device_of(ctx: mx.Context | None) -> str:
    """``"gpu"`` or ``"cpu"``: whose kernels a graph on ``ctx`` (default: the current context) meets."""
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def fit_to_device(casted: CastGraph, device: str, grad_req: Mapping[str, str] = UNKNOWN) -> Graph:
    """The graph that runs on ``device``; takes ``casted`` over.

    ``grad_req``: what is asked of the gradients of variables, by name; of others it may be anything.

    - float16 on a GPU: as it is; every low-precision node is a native kernel.
    - bfloat16 on a CPU: casts become ``amp_cast``, which oneDNN does; ``Cast`` truncates to bfloat16
      instead of rounding, and is slower. Operators that truncate too are computed by others that round.
    - float16 on a CPU: emulated.
    """
    if device == "gpu":
        return casted.graph
    if casted.compute == "bfloat16":
        _warn_of_slow_bfloat16()
        for node in casted.graph.nodes():
            if is_ours(node):
                node.op = "amp_cast"
        round_bfloat16(casted.low)
        select_seen_taps(casted.graph)
        _copy_before_casts(casted.graph, grad_req)
        plain_grouped_weights(casted.graph)
        plain_volumes(casted.graph)
    else:
        emulate(casted)
    ask_for_weight_gradients(casted.graph, grad_req)
    return casted.graph


def _copy_before_casts(graph: Graph, grad_req: Mapping[str, str]) -> None:
    """A copy between an accumulated variable and its casts, in place.

    oneDNN's backward of ``amp_cast`` ignores "add" and leaves the gradient as it was. The copy's does not; it
    costs about 0.4 ns per element, forward and backward, so only those that need it pay.
    """
    copies: dict[Entry, Entry] = {}
    for node in list(graph.nodes()):
        if node.op == "amp_cast" and is_ours(node):
            variable = node.inputs[0]
            if variable.node.is_variable and grad_req.get(variable.node.name, "add") == "add":
                if variable not in copies:
                    name = f"{variable.node.name}_accumulated"
                    copies[variable] = Entry(Node("_copy", name, {MARK: "cast"}, [variable]))
                node.inputs[0] = copies[variable]


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
