"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from types import MappingProxyType
from typing import Mapping

import mxnet as mx

from .. import cpu
from ..precision.casts import CastGraph
from ..precision.graph import Graph
from .table import WORKAROUNDS
from .workaround import FittedGraph

# A ``grad_req`` for ``fit_to_device`` by which no variable's requested gradient is known.
# Then every workaround is applied that any request would need.
UNKNOWN: Mapping[str, str] = MappingProxyType({})
# The environment variable that names the workarounds to leave out, separated by commas.
SWITCH = "MXMP_WITHOUT"


def device_of(ctx: mx.Context | None) -> str:
    """Return ``"gpu"`` or ``"cpu"`` for a context; None stands for the current one, and ``cpu_pinned`` is a CPU."""
    if not isinstance(ctx, (mx.Context, type(None))):
        raise TypeError(f"expected an mxnet Context, such as mx.cpu() or mx.gpu(0), got {ctx!r}")
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def fit_to_device(
    casted: CastGraph,
    device: str,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,
    avoid_slow_kernels: bool = True,
) -> Graph:
    """Apply the workarounds that a device needs to a converted graph, in place; return the graph, ready to run.
    ``large_inputs``: it runs only where ``LargeInputs.at`` is True. ``casted.workarounds`` gets the nodes of each.
    """
    if device == "cpu" and casted.compute == "bfloat16" and casted.low:
        _warn_of_slow_bfloat16()
    fitted = FittedGraph(casted, grad_req, large_inputs)
    left_out = _switched_off(os.environ.get(SWITCH, ""))
    for row in WORKAROUNDS:
        applies = avoid_slow_kernels or row.effect != "slow"
        if applies and device in row.devices and casted.compute in row.dtypes and row.name not in left_out:
            nodes = row.rewrite(fitted)
            if nodes:
                casted.workarounds[row.name] = list(nodes)
    return casted.graph


def _switched_off(text: str) -> set[str]:
    """Return the workarounds that the text of ``MXMP_WITHOUT`` names, separated by commas."""
    names = set(filter(None, text.split(",")))
    known = [row.name for row in WORKAROUNDS]
    if names - set(known):
        raise ValueError(f"{SWITCH}={text}: there is no workaround {min(names - set(known))!r}; there are {known}")
    return names


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16() -> None:
    if cpu.lacks("avx512_bf16", "amx_bf16"):
        warnings.warn(
            "this CPU has neither AVX512-BF16 nor AMX, so bfloat16 is emulated: expect no gain over FP32",
            stacklevel=4,
        )
