"""A graph of one operator, run; and what MXNet says where it cannot."""

from __future__ import annotations

import re
from typing import Any, List

import mxnet as mx
import numpy as np

from mxmp.precision.graph import Graph

from .case import Case

Arrays = List[np.ndarray]


def run(
    graph: Graph,
    case: Case,
    ctx: mx.Context,
    values: Arrays,
    heads: Any,
    *,
    dtypes: dict[str, Any] | None = None,
    start: Arrays | None = None,
) -> tuple[Arrays, Arrays]:
    """Return the outputs and the gradients; without ``heads`` no gradients. They are added to ``start``, if given."""
    symbol = graph.to_symbol()
    dtypes = dtypes or {f"in{i}": spec.dtype for i, spec in enumerate(case.inputs)}
    arrays = {f"in{i}": mx.nd.array(v, ctx=ctx, dtype=dtypes[f"in{i}"]) for i, v in enumerate(values)}
    names = symbol.list_arguments()
    trained = [f"in{i}" for i, s in enumerate(case.inputs) if s.grad and heads is not None and f"in{i}" in names]
    begun = start or [np.zeros(arrays[name].shape, "float32") for name in trained]
    grads = {n: mx.nd.array(value, ctx=ctx, dtype=arrays[n].dtype) for n, value in zip(trained, begun)}
    requests = {name: ("add" if start else "write") if name in grads else "null" for name in names}
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    executor = symbol.bind(ctx, {name: arrays[name] for name in names}, grads or None, requests, states)
    outputs = executor.forward(is_train=True)
    if grads:
        executor.backward([mx.nd.array(head, ctx=ctx, dtype=out.dtype) for head, out in zip(heads, outputs)])
    return [out.astype("float32").asnumpy() for out in outputs], [g.astype("float32").asnumpy() for g in grads.values()]


def reason_of(error: Exception) -> str:
    """MXNet's last line, without the time and the place in its sources."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(("Stack", "  ["))]
    last = lines[-1] if lines else type(error).__name__
    return re.sub(r"\[\d+:\d+:\d+\] \S+ ", "", last.split("Error: ")[-1]).strip()[:160]
