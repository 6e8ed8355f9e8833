"""Finds, among the tensors of a step, the first that is not finite, and says what made it so."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from ...observed import SUM, Observed, ObservedGraph
from ...precision.graph import VARIABLE
from ...step.scaler import MIN_SCALE
from ..watching.histogram import FORMATS
from .report import Blame, Range

_OF_LOSS = "the gradient of the loss"


class Record(NamedTuple):
    """The range of a tensor of a step; ``observed`` is None if neither an operator nor a cast made the tensor."""

    observed: Observed | None
    range: Range


def _gradients_in(dtype: str, records: Sequence[Record]) -> Iterator[float]:
    """Yield the largest absolute value of each gradient in ``dtype`` that has a finite one."""
    for observed, found in records:
        is_gradient = found.name.startswith("the gradient of") if observed is None else observed.backward
        if is_gradient and found.dtype == dtype and not math.isnan(found.largest):
            yield found.largest


def verdict(
    records: Sequence[Record],
    graphs: Sequence[ObservedGraph],
    params: Sequence[str],
    scale: float,
    replayed: Callable[[float], Sequence[Record]] | None = None,
) -> Blame:
    """Return the report on the first tensor that is not finite, of all ``records`` of a step in their order.
    ``params`` has frozen ones too. ``replayed`` returns the records at another loss scale, None estimates them.
    """
    for i, (observed, found) in enumerate(records):
        if not found.finite:
            # All in front are finite, so the operator that made the tensor is at fault, not its inputs.
            step = _Step(records[:i], graphs, params, scale, replayed)
            return step.blame_other(found) if observed is None else step.blame_operator(observed, found)
    cause = (
        "every value and gradient was finite. The batch is not the one that failed, or the weights have changed since, "
        "or dropout drew other numbers, or another batch of an accumulated gradient is at fault"
    )
    return Blame(False, "nowhere", "", "", "", cause, None, (), scale)


class _Step(NamedTuple):
    """A step up to its first tensor that is not finite; the other arguments are those of ``verdict``."""

    past: Sequence[Record]
    graphs: Sequence[ObservedGraph]
    params: Sequence[str]
    scale: float
    replayed: Callable[[float], Sequence[Record]] | None

    def advice(self, found: Range, unrounded: Range | None = None) -> str:
        """Say whether a lower loss scale avoids the overflow of ``found``, and which."""
        if self.scale <= MIN_SCALE:
            return f"The loss scale is {self.scale:g}, and not the cause"
        limit = FORMATS[found.dtype].largest if found.dtype in FORMATS else float(np.finfo(np.float32).max)
        if self.replayed is not None:
            replay = self.replayed(MIN_SCALE)
            peak = max(_gradients_in(found.dtype, replay), default=0.0)
            true = peak / MIN_SCALE if all(record.range.finite for record in replay) else math.inf
        elif unrounded is not None:
            true = unrounded.largest / self.scale
        else:
            return "A lower loss scale may avoid it"
        if true * MIN_SCALE > limit:
            return f"The loss scale is {self.scale:g}, and not the cause: none down to {MIN_SCALE:.3g} avoids it"
        most = self.scale / 2 if true == 0 else min(self.scale / 2, 2.0 ** math.floor(math.log2(limit / true)))
        return f"A lower loss scale avoids it: {most:g} or less"

    def blame_other(self, found: Range) -> Blame:
        """Report on a tensor that neither an operator nor a cast made."""
        past, params = self.past, self.params
        inputs: tuple[Range, ...] = ()
        if found.name in params and past and past[-1].range.name == found.name:  # the master, which is finite
            inputs = (replace(past[-1].range, name=f"{found.name}, unrounded"),)
            where, cause = "parameter", _overflow_text(inputs[0], found.dtype)
        elif found.name in params:
            where = "parameter"
            cause = "it was not finite before this step: an earlier step went wrong, or it was given this value"
        elif found.name.startswith("the loss"):
            where, cause = "loss", "the loss is not finite, and what the net returned is"
        elif found.name.startswith("the gradient of the loss"):
            where, cause = "loss", f"the loss is finite, and its gradient is not. {self.advice(found)}"
        elif found.name.startswith("the gradient of"):
            where = "update"
            cause = "finite gradients of several blocks were added up, or a block that runs as Python computed it"
        else:
            where, cause = "input", "the input data are not finite"
        if where == "loss":
            inputs = tuple(r.range for r in past if r.observed is not None and not r.observed.backward)[-1:]
        return Blame(True, where, found.name, "", found.dtype, cause, found, inputs, self.scale)

    def blame_operator(self, observed: Observed, found: Range) -> Blame:
        """Report on a tensor that an operator of the network, or a cast, made."""
        graph = next((graph for graph in self.graphs if observed.node in graph), None)
        low = self.graphs[0].plan.policy.compute
        where = "backward" if observed.backward else "forward"
        unrounded = _unrounded(self.past, observed, found) if observed.inserted else None
        dtype = low if observed.low or observed.inserted else "float32"
        inputs = () if graph is None else _inputs_of(self.past, graph, observed)
        has_no_result = unrounded is None and found.dtype == "float32" and found.nans
        advice = f". {self.advice(found, unrounded)}" if observed.backward and not has_no_result else ""
        name, op = observed.operator, observed.op
        if unrounded is not None:
            cause, dtype = _overflow_text(unrounded, low), low
            if unrounded.name == SUM:
                cause = f"a sum of gradients, its own among them, has an {cause}"
            if unrounded.name == _OF_LOSS:
                where, name, op = "loss", "the loss", ""
                cause = f"its gradient has an {cause}"
            if op == VARIABLE and name in self.params:
                where, op = "parameter", ""
            elif op == VARIABLE:
                where, name, op = "input", unrounded.name, ""
            before = replace(unrounded, name=f"{unrounded.name}, unrounded")
            inputs = (*(r for r in inputs if r != unrounded), before)
            cause += advice
        elif found.dtype != "float32":
            cause = f"overflow of {found.dtype}{advice}"
        else:
            dtype = "float32"
            cause = "inf in FP32 from finite inputs: a division by zero, a logarithm of zero, or beyond FP32's range"
            if has_no_result:
                why = "it has no result for some of them, as 0/0 or the root of a negative number"
                cause = f"NaN from finite inputs: {why}"
            cause += advice
            rounded = [] if graph is None else _rounded_inputs(graph, observed.operator)
            if rounded:
                cause += (
                    f". {rounded[0]}, which it reads, is rounded to {low}, perhaps onto one without a finite result"
                )
        return Blame(True, where, name, op, dtype, cause, found, inputs, self.scale)


def _rounded_inputs(graph: ObservedGraph, operator: str) -> list[str]:
    """Return the operators in low precision whose values ``operator`` reads, also through what has one input."""
    found, left = [], list(graph.inputs(operator))
    while left:
        node = left.pop().node
        decision = graph.plan.decisions.get(graph.original_name(node))
        if decision is not None and decision.low:
            found.append(graph.original_name(node))
        elif len(node.inputs) == 1:
            left += node.inputs
    return found


def _overflow_text(unrounded: Range, dtype: str) -> str:
    return f"overflow: {unrounded.largest:.4g} is rounded to {dtype}, which ends at {FORMATS[dtype].largest:.5g}"


def _unrounded(past: Sequence[Record], observed: Observed, found: Range) -> Range | None:
    """Return the FP32 range in ``past`` of a tensor before a cast rounded it to ``found``; None if it is not there."""
    if found.dtype == "float32":
        return None
    fitting = [r.range for r in reversed(past) if r.range.shape == found.shape and r.range.dtype == "float32"]
    beyond = [r for r in fitting if r.largest > FORMATS[found.dtype].largest]
    # The gradient of the loss is preferred to the tensor's own label, and this to a sum; the last of several.
    labels = [_OF_LOSS] if observed.of_output else []
    if observed.op == VARIABLE:  # a net's inputs are recorded under other names: "the input"
        labels += [r.name for r in beyond if r.name.startswith(("the input", "input "))]
    return next((r for label in [*labels, observed.label, SUM] for r in beyond if r.name == label), None)


def _inputs_of(past: Sequence[Record], graph: ObservedGraph, observed: Observed) -> tuple[Range, ...]:
    """Return the ranges of what an operator read: gradients sent to it, then the net's inputs, then its own."""
    known = {record.range.name: record.range for record in past}
    sent = [r for name, r in known.items() if observed.backward and name.endswith(f" -> {observed.operator}")]
    names = [graph.original_name(entry.node) for entry in graph.inputs(observed.operator)]
    # A net's inputs are recorded under other names: "the input".
    data = [] if set(names) <= set(known) else [r for n, r in known.items() if n.startswith(("the input", "input "))]
    return tuple(dict.fromkeys([*sent, *data, *(known[name] for name in names if name in known)]))
