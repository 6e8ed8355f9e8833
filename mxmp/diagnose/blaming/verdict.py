"""From all tensors of a replay, in order, to the one that is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Sequence

from ...observed import SUM, Observed, ObservedGraph
from ...precision.graph import VARIABLE
from ..watching.histogram import FORMATS
from .report import Blame, Range

__all__ = ["Record", "verdict"]


class Record(NamedTuple):
    """One tensor of a step. ``observed``: None where no operator of the network made it."""

    observed: Observed | None
    range: Range


def verdict(records: Sequence[Record], graphs: Sequence[ObservedGraph], params: Sequence[str], scale: float) -> Blame:
    """Return the Blame of the first tensor that is not finite.

    All tensors before it are finite, so what made it is to blame, and not what it read.
    """
    for i, (observed, found) in enumerate(records):
        if not found.finite:
            past = records[:i]
            if observed is None:
                return _blame_other(past, found, params, scale)
            return _blame_operator(past, observed, found, graphs, params, scale)
    cause = (
        "every value and gradient was finite. The batch is not the one that failed, or the weights have changed since, "
        "or dropout drew other numbers, or another batch of an accumulated gradient is at fault"
    )
    return Blame(False, "nowhere", "", "", "", cause, None, (), scale)


def _blame_other(past: Sequence[Record], found: Range, params: Sequence[str], scale: float) -> Blame:
    inputs: tuple[Range, ...] = ()
    if found.name in params and past and past[-1].range.name == found.name:  # the master, which is finite
        inputs = (replace(past[-1].range, name=f"{found.name}, unrounded"),)
        where, cause = "parameter", _overflow_text(inputs[0], found.dtype)
    elif found.name in params:
        where, cause = "parameter", "it was so before this step, which cannot be the first that went wrong"
    elif found.name.startswith("the loss"):
        where, cause = "loss", "the loss is not finite, and what the net returned is"
    elif found.name.startswith("the gradient of the loss"):
        where, cause = "loss", f"its gradient is not finite, and itself is. {_scale_advice(scale)}"
    elif found.name.startswith("the gradient of"):
        where, cause = "update", "finite gradients were added up, over devices or over several backwards"
    else:
        where, cause = "input", "the input data are not finite"
    if where == "loss":
        inputs = tuple(r.range for r in past if r.observed is not None and not r.observed.backward)[-1:]
    return Blame(True, where, found.name, "", found.dtype, cause, found, inputs, scale)


def _blame_operator(
    past: Sequence[Record],
    observed: Observed,
    found: Range,
    graphs: Sequence[ObservedGraph],
    params: Sequence[str],
    scale: float,
) -> Blame:
    graph = next((graph for graph in graphs if observed.node in graph), None)
    low = graphs[0].plan.policy.compute
    where = "backward" if observed.backward else "forward"
    unrounded = _unrounded(past, observed, found) if observed.inserted else None
    dtype = low if observed.low or observed.inserted else "float32"
    inputs = () if graph is None else _inputs_of(past, graph, observed)
    advice = f". {_scale_advice(scale)}" if observed.backward else ""
    name, op = observed.operator, observed.op
    if unrounded is not None:
        cause, dtype = _overflow_text(unrounded, low), low
        if unrounded.name == SUM:
            cause = f"a sum of gradients, its own among them, has an {cause}"
        if observed.of_output:
            where, name, op = "loss", "the loss", ""
            cause = f"its gradient has an {cause}"
        if op == VARIABLE:
            where, op = ("parameter" if name in params else "input"), ""
        before = replace(unrounded, name=f"{unrounded.name}, unrounded")
        inputs = (*(r for r in inputs if r != unrounded), before)
        cause += advice
    elif found.dtype != "float32":
        cause = f"overflow of {found.dtype}{advice}"
    else:
        dtype = "float32"
        cause = "NaN from finite inputs: it has no result for some of them, as 0/0 or the root of a negative number"
        if not found.nans:
            cause = "inf in FP32 from finite inputs: a division by zero, a logarithm of zero, or beyond FP32's range"
            cause += advice
    return Blame(True, where, name, op, dtype, cause, found, inputs, scale)


def _overflow_text(unrounded: Range, low: str) -> str:
    return f"overflow: {unrounded.largest:.4g} is rounded to {low}, which ends at {FORMATS[low].largest:.5g}"


def _unrounded(past: Sequence[Record], observed: Observed, found: Range) -> Range | None:
    """Return what an inserted cast read: the last FP32 tensor of its name, or the last sum of gradients."""
    if found.dtype == "float32":
        return None
    labels = ("the gradient of the loss",) if observed.of_output else (observed.label, SUM)
    fitting = (r.range for r in reversed(past) if r.range.shape == found.shape and r.range.dtype == "float32")
    return next((r for r in fitting if r.name in labels), None)


def _inputs_of(past: Sequence[Record], graph: ObservedGraph, observed: Observed) -> tuple[Range, ...]:
    """Return what the operator read, by its inputs' names; in backward also the gradients that were sent to it."""
    known = {record.range.name: record.range for record in past}
    sent = [r for name, r in known.items() if observed.backward and name.endswith(f" -> {observed.operator}")]
    names = [graph.original_name(entry.node) for entry in graph.inputs(observed.operator)]
    data = [] if set(names) <= set(known) else [r for n, r in known.items() if n.startswith(("the input", "input "))]
    return tuple(dict.fromkeys([*sent, *data, *(known[name] for name in names if name in known)]))


def _scale_advice(scale: float) -> str:
    return "A lower loss scale avoids it" if scale > 1 else "The loss scale is 1, and not the cause"
