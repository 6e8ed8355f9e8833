"""Graphs that run operator by operator: MXNet's own oneDNN fusion is wrong in places."""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx

__all__ = ["Unfused"]


class Unfused(mx.sym.Symbol):
    """A copy of ``symbol`` that binds without MXNet's oneDNN fusion.

    MXNet partitions a graph whose default context is cpu(0), and has one switch, an environment variable of the whole
    process, that prints a line at every bind. But a default context is only for nodes that have no other: here all
    variables are of a group, whose context is the real one, the operators follow their inputs, and the default is
    another. Groups that the user places by ``group2ctxs`` stay; others are dropped, as MXNet ignores them if none is
    placed. (A Custom operator takes the name of its group for an argument, so none is set there.)
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
                if not node["inputs"]:
                    attrs["__ctx_group__"] = self.GROUP
        grouped = mx.sym.load_json(json.dumps(raw))
        super().__init__(grouped.handle)
        grouped.handle = None

    def bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        return super().bind(_another(ctx), *args, group2ctx={**(group2ctx or {}), self.GROUP: ctx}, **kwargs)

    def simple_bind(self, ctx: mx.Context, *args: Any, group2ctx: dict | None = None, **kwargs: Any) -> mx.Executor:
        return super().simple_bind(_another(ctx), *args, group2ctx={**(group2ctx or {}), self.GROUP: ctx}, **kwargs)


def _another(ctx: mx.Context) -> mx.Context:
    return mx.Context(ctx.device_type, ctx.device_id + 1)
