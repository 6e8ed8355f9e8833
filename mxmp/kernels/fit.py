"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from types import MappingProxyType
from typing import Mapping

import mxnet as mx

from ..precision.casts import CastGraph
from ..precision.graph import Graph
from .table import WORKAROUNDS
from .workaround import Fitting

__all__ = ["SWITCH", "UNKNOWN", "device_of", "fit_to_device"]

# No variable's requested gradient is known.
UNKNOWN: Mapping[str, str] = MappingProxyType({})
# The environment variable with names of workarounds, separated by commas, that are left out.
SWITCH = "MXMP_WITHOUT"


def device_of(ctx: mx.Context | None) -> str:
    """Return ``"gpu"`` or ``"cpu"``: whose kernels a graph on ``ctx`` (default: the current context) meets."""
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
    """Return the graph that runs on ``device``; changes ``casted`` in place.

    Applies the rows of ``WORKAROUNDS`` in their order, and notes in ``casted.workarounds`` which one was applied to
    which nodes. On a GPU float16 is as it is: every low node is a native kernel.

    Parameters
    ----------
    grad_req : mapping of str to str
        The requested gradients of variables, by name; those of other variables are unknown.
    large_inputs : bool
        Whether the graph will run only at shapes for which ``LargeInputs`` holds.
    avoid_slow_kernels : bool
        Whether workarounds whose effect is speed alone are applied too.

    Raises
    ------
    ValueError
        The environment variable ``MXMP_WITHOUT`` names a workaround that does not exist.
    """
    if device == "cpu" and casted.compute == "bfloat16" and casted.low:
        _warn_of_slow_bfloat16()
    fitting = Fitting(casted, grad_req, large_inputs)
    left_out = _switched_off(os.environ.get(SWITCH, ""))
    for row in WORKAROUNDS:
        applies = avoid_slow_kernels or row.effect != "slow"
        if applies and row.device == device and casted.compute in row.dtypes and row.name not in left_out:
            nodes = list(row.where(fitting))
            if nodes:
                row.rewrite(fitting, nodes)
                casted.workarounds[row.name] = nodes
    return casted.graph


def _switched_off(text: str) -> set[str]:
    names = set(filter(None, text.split(",")))
    known = [row.name for row in WORKAROUNDS]
    if names - set(known):
        raise ValueError(f"{SWITCH}={text}: there is no workaround {min(names - set(known))!r}; there are {known}")
    return names


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> None:
    """Warn, once, on a CPU without bfloat16 instructions: oneDNN then emulates bfloat16 in FP32."""
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
