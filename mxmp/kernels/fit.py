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
UNKNOWN: Mapping[str, str] = MappingProxyType({})
# The environment variable that names the workarounds to leave out, separated by commas.
SWITCH = "MXMP_WITHOUT"


def device_of(ctx: mx.Context | None) -> str:
    """Return ``"gpu"`` or ``"cpu"``: the device whose kernels compute a graph on ``ctx``.

    ``None`` stands for the current context. A context of another type, such as ``cpu_pinned``, counts as ``"cpu"``.
    Raises ``ValueError`` for what is no context, such as the text ``"gpu"``.
    """
    if ctx is not None and not isinstance(ctx, mx.Context):
        raise ValueError(f"ctx={ctx!r}: expected a context, such as mx.cpu() or mx.gpu(0), or None for the current one")
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
    """Apply to a converted graph, in place, the workarounds that a device needs; return that graph, ready to run.

    The workarounds are applied in the order of ``WORKAROUNDS``. ``casted.workarounds`` then maps the name of each one
    that the graph needed to the nodes that needed it. On a CPU one of the workarounds emulates float16. Warns, once in
    a process, if bfloat16 is to run on a CPU without bfloat16 instructions, and so saves no time. No operator runs
    here.

    Parameters
    ----------
    casted : CastGraph
        The graph as ``insert_casts`` returned it.
    device : {"cpu", "gpu"}
        Where the graph will run.
    grad_req : mapping of str to str
        From the name of a variable to its requested gradient: "write", "add" or "null". For a variable that is not in
        it, every workaround is applied that one of the three requests would need.
    large_inputs : bool
        True if the caller runs the graph only with inputs for which ``LargeInputs.at`` returned True: workarounds for
        wrong gradients around padding are left out.
    avoid_slow_kernels : bool
        False leaves out the workarounds that change nothing but speed.

    Raises
    ------
    ValueError
        The environment variable ``MXMP_WITHOUT`` names a workaround that does not exist.
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
    """Return the names of the workarounds to leave out, from the text of ``MXMP_WITHOUT``, ``"amp_cast,split_casts"``.

    The set is empty for ``""``. Raises ``ValueError`` if one of the names is not a workaround's.
    """
    names = set(filter(None, text.split(",")))
    known = [row.name for row in WORKAROUNDS]
    if names - set(known):
        raise ValueError(f"{SWITCH}={text}: there is no workaround {min(names - set(known))!r}; there are {known}")
    return names


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16() -> None:
    """Warn, once in a process, if this CPU has no bfloat16 instructions: oneDNN then computes bfloat16 in FP32."""
    if cpu.lacks("avx512_bf16", "amx_bf16"):
        warnings.warn(
            "this CPU has neither AVX512-BF16 nor AMX, so bfloat16 is emulated: expect no gain over FP32",
            stacklevel=4,
        )
