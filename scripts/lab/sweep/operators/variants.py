"""The other ways in which a GPU may run an operator: added gradients, fused with its casts, safe sums."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Iterator

import mxnet as mx
import numpy as np
from support.operators.case import Case
from support.operators.errors import largest_error, short
from support.operators.running import Arrays, run

from mxmp.precision.graph import Graph


def variants(
    case: Case, plain: Graph, low: Graph, values: Arrays, heads: Arrays, exact: Any, found: Any
) -> Iterator[dict[str, Any]]:
    """Yield largest errors in units in the last place of each array's largest value.

    ``fused``: how far the graph with casts is from ``found`` where MXNet may fuse it. ``add``: of gradients that the
    operator's float16 kernel adds to an array, from the rounded sum. ``safe``: forward and backward from ``exact`` with
    ``MXNET_SAFE_ACCUMULATION``, where that changes a bit of the kernel's. What MXNet refuses is left out.
    """
    with _refusals(), _environment("MXNET_USE_FUSION", "1"):
        yield {"fused": apart(run(low, case, mx.gpu(), values, heads), found)}
    dtypes = _native(plain, case)
    if dtypes is None:
        return
    with _refusals():
        written = run(plain, case, mx.gpu(), values, heads, dtypes=dtypes)
        with _refusals(), _environment("MXNET_SAFE_ACCUMULATION", "1"):
            safe = run(plain, case, mx.gpu(), values, heads, dtypes=dtypes)
            if apart(safe, written):
                yield {"safe": [apart((way, []), (wanted, [])) for way, wanted in zip(safe, exact)]}
        rng = np.random.RandomState(9)
        start = [rng.normal(0, 1, grad.shape).astype("float16").astype("float32") for grad in written[1]]
        if start:
            added = run(plain, case, mx.gpu(), values, heads, dtypes=dtypes, start=start)[1]
            with np.errstate(over="ignore", invalid="ignore"):
                sums = [(s + g).astype("float16").astype("float32") for s, g in zip(start, written[1])]
            yield {"add": apart(([], added), ([], sums))}


def _native(plain: Graph, case: Case) -> dict[str, Any] | None:
    """Return the dtype of each input where those with a gradient are float16, or None if MXNet takes no float16."""
    symbol = plain.to_symbol()
    half = {f"in{i}": np.float16 for i, spec in enumerate(case.inputs) if spec.grad}
    for given in (half, dict(list(half.items())[:1])):  # a norm's scale and shift are FP32
        try:
            found = symbol.infer_type(**given)
        except mx.MXNetError:
            continue
        names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
        return dict(zip(names, [*found[0], *found[2]]))
    return None


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except mx.MXNetError:
        mx.nd.waitall()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def apart(found: Any, wanted: Any) -> float:
    """Return the largest error of outputs and gradients, from those that are wanted."""
    return short(max((largest_error(*pair) for way in zip(found, wanted) for pair in zip(*way)), default=0.0))
