"""A Symbol that binds without MXNet's oneDNN fusion, which gives wrong numbers for some graphs."""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx

# Operators that MXNet registers as gradients by mistake (TIsBackward in src/operator/tensor/indexing_op.cc). It places
# a gradient where its forward operator is. These have none, and it crashes unless they are in a group.
_TAKEN_FOR_GRADIENTS = ("_npi_gather_nd", "_npx_gather_nd", "gather_nd", "scatter_nd")


class Unfused(mx.sym.Symbol):
    """A copy of a Symbol whose ``bind`` and ``simple_bind`` do not let MXNet fuse operators by oneDNN.

    That fusion gives wrong numbers for some graphs. MXNet fuses a graph on a CPU if the context that ``bind`` gets is
    ``cpu(0)``. The only switch for the fusion is an environment variable for the whole process, by which MXNet prints a
    line at every bind. So here MXNet gets another context, ``cpu(1)`` for ``cpu(0)``, on which nothing runs: variables
    and operators without inputs are put into one context group, which is placed on the context that the caller passes
    to ``bind``. Operators that MXNet takes for gradients by mistake, such as ``gather_nd``, are put into this group
    too: MXNet crashes if one is in no group. All other operators run where their inputs are.

    Parameters
    ----------
    symbol : Symbol
        Is copied, and stays as it is.
    group2ctxs : dict of str to Context, or list of such dicts, or None
        As for ``mx.mod.Module``: from the name of a context group to its context; None stands for no groups. Only the
        names are used; pass the contexts to ``bind`` too. Nodes in these groups stay in them; nodes in other groups,
        which MXNet ignores, are taken out. (The other operators are put into no group, as a Custom operator would take
        the name of its group for an argument.)
    """

    GROUP = "mxmp"

    def __init__(self, symbol: mx.sym.Symbol, group2ctxs: Any = None) -> None:
        placed = group2ctxs if isinstance(group2ctxs, list) else [group2ctxs]
        groups = {name for each in placed for name in each or ()}
        raw = json.loads(symbol.tojson(remove_amp_cast=False))
        for node in raw["nodes"]:
            attrs = node.setdefault("attrs", {})
            if attrs.get("__ctx_group__") not in groups:
                attrs.pop("__ctx_group__", None)
                if not node["inputs"] or node["op"] in _TAKEN_FOR_GRADIENTS:
                    attrs["__ctx_group__"] = self.GROUP
        grouped = mx.sym.load_json(json.dumps(raw, ensure_ascii=False))  # MXNet cannot read the escape \u
        super().__init__(grouped.handle)
        grouped.handle = None

    def bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        """Return an executor on ``ctx`` without oneDNN fusion; all arguments are those of ``mx.sym.Symbol.bind``."""
        group2ctx = {**(group2ctx or {}), self.GROUP: ctx}
        return super().bind(_next_context(ctx), *args, group2ctx=group2ctx, **kwargs)

    def simple_bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        """Return an executor on ``ctx`` without oneDNN fusion; arguments as for ``mx.sym.Symbol.simple_bind``."""
        group2ctx = {**(group2ctx or {}), self.GROUP: ctx}
        return super().simple_bind(_next_context(ctx), *args, group2ctx=group2ctx, **kwargs)


def _next_context(ctx: mx.Context) -> mx.Context:
    """Return the context of the same type with the next number: ``cpu(1)`` for ``cpu(0)``.

    ``Unfused`` gives it to MXNet's ``bind``, so that MXNet does not fuse operators. No operator runs there.
    """
    return mx.Context(ctx.device_type, ctx.device_id + 1)
