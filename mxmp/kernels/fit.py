"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import os

import mxnet as mx

from ..precision.casts import LowGraph
from .table import WORKAROUNDS

# The environment variables that name the workarounds to leave out, and the optional ones to apply, by commas.
SWITCH, SWITCH_ON = "MXMP_WITHOUT", "MXMP_WITH"


def device_of(ctx: mx.Context | None) -> str:
    """Return ``"gpu"`` or ``"cpu"`` for a context; None stands for the current one, and ``cpu_pinned`` is a CPU."""
    if not isinstance(ctx, (mx.Context, type(None))):
        raise TypeError(f"expected an mxnet Context, such as mx.cpu() or mx.gpu(0), got {ctx!r}")
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def fit_to_device(low: LowGraph, *, avoid_slow_kernels: bool = True) -> None:
    """Apply the workarounds that the plan's device needs, in place; ``low.workarounds`` gets the nodes of each."""
    device, left_out, requested = low.planned.plan.device, _named_by(SWITCH), _named_by(SWITCH_ON)
    for row in WORKAROUNDS:
        concerns = device in row.devices and low.compute in row.dtypes and (avoid_slow_kernels or row.effect != "slow")
        if concerns and row.name not in left_out:
            nodes = row.rewrite(low) if row.name in requested or (not row.optional and row.here()) else ()
            if nodes:
                low.workarounds[row.name] = list(nodes)


def _named_by(switch: str) -> set[str]:
    """Return the workarounds that an environment variable names."""
    text = os.environ.get(switch, "")
    names = set(filter(None, text.split(",")))
    known = [row.name for row in WORKAROUNDS]
    if names - set(known):
        raise ValueError(f"{switch}={text}: there is no workaround {min(names - set(known))!r}; there are {known}")
    return names
