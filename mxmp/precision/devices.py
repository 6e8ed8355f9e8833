"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import warnings
from functools import lru_cache

import mxnet as mx

from .casts import CastGraph, is_ours
from .emulation import emulate
from .graph import Graph
from .onednn import plain_grouped_weights

__all__ = ["device_of", "fit_to_device"]


def device_of(ctx: mx.Context | None) -> str:
    """``"gpu"`` or ``"cpu"``: whose kernels a graph on ``ctx`` (default: the current context) meets."""
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def fit_to_device(casted: CastGraph, device: str) -> Graph:
    """The graph that runs on ``device``; takes ``casted`` over.

    - float16 on a GPU: as it is; every low-precision node is a native kernel.
    - bfloat16 on a CPU: casts become ``amp_cast``, which oneDNN does; ``Cast`` truncates to bfloat16
      instead of rounding, and is slower.
    - float16 on a CPU: emulated.
    """
    if device == "gpu":
        return casted.graph
    if casted.compute == "bfloat16":
        _warn_of_slow_bfloat16()
        for node in casted.graph.nodes():
            if is_ours(node):
                node.op = "amp_cast"
        plain_grouped_weights(casted.graph)
        return casted.graph
    return emulate(casted)


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
