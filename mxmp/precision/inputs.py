"""Data that a matrix product reads in low precision as they come, and whose digits it would round away.

No graph shows this: a year is as good an input as a temperature, until bfloat16 has one step for 2008 to 2016.
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, Mapping

import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..messages.callers import warn_user
from .graph import Graph, Node
from .plan import Plan
from .rule import Role
from .rules import rule_under

# Rounding takes 1 / sqrt(12) of a step: of a column that varies by 16 steps it is 2 %.
_STEPS = 16
_BITS = {"float16": 11, "bfloat16": 8}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38}
# So many rows say how a column varies.
_ROWS, _LEAST_ROWS = 256, 8


class InputCheck:
    """Looks once at each input of a network."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look_at(self, arrays: Mapping[str, NDArray], graph: Callable[[], Graph], plan: Plan) -> None:
        """Warn of inputs, by name, whose digits the first low-precision product of an FP32 graph would lose. Waits for
        the device if a product reads one of them as it comes."""
        if not self._seen.issuperset(arrays):
            new = {name: array for name, array in arrays.items() if name not in self._seen}
            self._seen.update(new)
            _warn_of(new, graph(), plan)


def _warn_of(arrays: Mapping[str, NDArray], graph: Graph, plan: Plan) -> None:
    for product, name in _read_as_they_come(graph, plan):
        if name in arrays and arrays[name].dtype == np.float32:
            with autograd.pause():
                values = arrays[name][:_ROWS].asnumpy()
            lost = _lost(_columns(values, product), plan.policy.compute) if values.size else ""
            if lost:
                warn_user(
                    f"{name!r} goes as it is into {product.name!r} ({product.op}) in {plan.policy.compute}, where "
                    f"{lost}. Normalize the data (subtract the mean, divide by the deviation), or keep the operator in "
                    f"FP32: exclude=[{product.name!r}]",
                )


def _read_as_they_come(graph: Graph, plan: Plan) -> Iterator[tuple[Node, str]]:
    names = graph.names()
    for node, name in names.items():
        if not node.is_variable and plan.decisions[name].low and rule_under(plan.policy, node.op).role is Role.MATRIX:
            yield from ((node, entry.node.name) for entry in node.inputs if entry.node.is_variable)


def _columns(values: np.ndarray, product: Node) -> np.ndarray:
    """Return the values as rows and columns: a column is a feature, or a channel of a convolution."""
    if product.op == "FullyConnected" and product.attrs.get("flatten", "True") == "True":
        return values.reshape(len(values), -1)
    channels = 1 if "kernel" in product.attrs and values.ndim > 2 else values.ndim - 1
    return np.moveaxis(values, channels, -1).reshape(-1, values.shape[channels])


def _lost(columns: np.ndarray, compute: str) -> str:
    """Return what rounding to ``compute`` takes from the worst of the columns, or ``""``."""
    largest = float(np.abs(columns).max(initial=0.0))
    if _LARGEST[compute] < largest < math.inf:
        return f"its value {largest:g} is infinity"
    if len(columns) < _LEAST_ROWS or not np.isfinite(columns).all():
        return ""
    mean, deviation = columns.mean(axis=0), columns.std(axis=0)
    size = np.abs(mean)
    apart = (size > deviation) & (deviation > 1e-6 * size)  # others have all their steps, or none to lose
    steps = np.full(mean.shape, np.inf)
    steps[apart] = deviation[apart] * np.exp2(_BITS[compute] - 1 - np.floor(np.log2(size[apart])))
    worst = int(steps.argmin())
    if steps[worst] >= _STEPS:
        return ""
    return (
        f"column {worst}, {mean[worst]:g} with a deviation of {deviation[worst]:.2g}, has only {steps[worst]:.2g} "
        "steps for it"
    )
