"""A Symbol that binds without MXNet's oneDNN fusion, which gives wrong numbers for some graphs."""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

import mxnet as mx

# Operators that MXNet registers as gradients by mistake (TIsBackward in src/operator/tensor/indexing_op.cc). It places
# a gradient where its forward operator is. These have none, and it crashes unless they are in a group.
_TAKEN_FOR_GRADIENTS = ("gather_nd", "scatter_nd")


class Unfused(mx.sym.Symbol):
    """A copy of a Symbol whose ``bind`` and ``simple_bind`` do not let MXNet fuse operators by oneDNN.
    ``group2ctxs`` is that of ``mx.mod.Module``; only its names count, and nodes in other groups lose theirs.
    """

    # MXNet fuses where bind gets cpu(0); its only switch is an environment variable for the process, with a line
    # printed at every bind. So bind gets cpu(1), and this group the real context: it has all nodes without inputs, and
    # the other operators run where their inputs are.
    GROUP = "mxmp"

    def __init__(self, symbol: mx.sym.Symbol, group2ctxs: Any = None) -> None:
        placed = group2ctxs if isinstance(group2ctxs, list) else [group2ctxs]
        groups = {name for each in placed for name in each or ()}
        raw = json.loads(symbol.tojson(remove_amp_cast=False))
        for node in raw["nodes"]:
            attrs = node.setdefault("attrs", {})
            if attrs.get("__ctx_group__") not in groups:
                attrs.pop("__ctx_group__", None)
                # No others: a Custom operator would take the name of its group for an argument.
                if not node["inputs"] or node["op"] in _TAKEN_FOR_GRADIENTS:
                    attrs["__ctx_group__"] = self.GROUP
        grouped = mx.sym.load_json(json.dumps(raw, ensure_ascii=False))  # MXNet cannot read the escape \u
        super().__init__(grouped.handle)
        grouped.handle = None

    def bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        return super().bind(_next_context(ctx), *args, group2ctx={**(group2ctx or {}), self.GROUP: ctx}, **kwargs)

    def simple_bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        groups = {**(group2ctx or {}), self.GROUP: ctx}
        return super().simple_bind(_next_context(ctx), *args, group2ctx=groups, **kwargs)


def unfused(symbol: mx.sym.Symbol, contexts: Sequence[mx.Context], group2ctxs: Any = None) -> mx.sym.Symbol:
    """Return what a Module on ``contexts`` is to bind for ``symbol``: an Unfused where MXNet would fuse."""
    fuses = mx.cpu(0) in contexts and "MXNET_SUBGRAPH_BACKEND" not in os.environ
    return Unfused(symbol, group2ctxs) if fuses else symbol


def _next_context(ctx: mx.Context) -> mx.Context:
    """Return ``cpu(1)`` for ``cpu(0)``: a context on which no operator runs."""
    return mx.Context(ctx.device_type, ctx.device_id + 1)
