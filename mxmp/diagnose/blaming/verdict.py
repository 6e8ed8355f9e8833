"""From all tensors of a replay, in order, to the one that is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Sequence

from ...precision.graph import VARIABLE
from ..watching.histogram import FORMATS
from ..watching.wiring import SUM, Seen, Wiring
from .report import Blame, Range

__all__ = ["Met", "verdict"]


class Met(NamedTuple):
    """A tensor that went by. ``seen``: None for what no operator of the net made."""

    seen: Seen | None
    range: Range


def verdict(met: Sequence[Met], wirings: Sequence[Wiring], params: Sequence[str], scale: float) -> Blame:
    """The first that is not finite. All before it are, so what made it is to blame, and not what it read."""
    for i, (seen, found) in enumerate(met):
        if not found.finite:
            past = met[:i]
            return (
                _outside(past, found, params, scale)
                if seen is None
                else _inside(past, seen, found, wirings, params, scale)
            )
    cause = (
        "every value and gradient was finite. The batch is not the one that failed, or the weights have changed since, "
        "or dropout drew other numbers, or another batch of an accumulated gradient is at fault"
    )
    return Blame(False, "nowhere", "", "", "", cause, None, (), scale)


def _outside(past: Sequence[Met], found: Range, params: Sequence[str], scale: float) -> Blame:
    """What no operator of the net made."""
    if found.name in params and past and past[-1].range.name == found.name:  # the master, which is finite
        before = replace(past[-1].range, name=f"{found.name}, unrounded")
        return Blame(
            True, "parameter", found.name, "", found.dtype, _rounded(before, found.dtype), found, (before,), scale
        )
    if found.name in params:
        where, cause = "parameter", "it was so before this step, which cannot be the first that went wrong"
    elif found.name.startswith("the loss"):
        where, cause = "loss", "the loss is not finite, and what the net returned is"
    elif found.name.startswith("the gradient of the loss"):
        where, cause = "loss", f"its gradient is not finite, and itself is. {_lower(scale)}"
    elif found.name.startswith("the gradient of"):
        where, cause = "update", "finite gradients were added up, over devices or over several backwards"
    else:
        where, cause = "input", "the data that the net was given are not finite"
    outputs = [m.range for m in past if m.seen is not None and not m.seen.backward]
    inputs = outputs[-1:] if where == "loss" else []
    return Blame(True, where, found.name, "", found.dtype, cause, found, tuple(inputs), scale)


def _inside(
    past: Sequence[Met], seen: Seen, found: Range, wirings: Sequence[Wiring], params: Sequence[str], scale: float
) -> Blame:
    wiring = next((wiring for wiring in wirings if seen.node in wiring), None)
    low = wirings[0].plan.policy.compute
    where = "backward" if seen.backward else "forward"
    unrounded = _unrounded(past, seen, found) if seen.ours else None
    dtype = low if seen.low or seen.ours else "float32"
    inputs = () if wiring is None else _inputs(past, wiring, seen)
    advice = f". {_lower(scale)}" if seen.backward else ""
    name, op = seen.operator, seen.op
    if unrounded is not None:
        cause = _rounded(unrounded, low)
        if unrounded.name == SUM:
            cause = f"a sum of gradients, its own among them, has an {cause}"
        if seen.enters:
            where, name, op = "loss", "the loss", ""
            cause = f"its gradient has an {cause}"
        if op == VARIABLE:
            where, op = ("parameter" if name in params else "input"), ""
        given = tuple(r for r in inputs if r != unrounded)
        before = replace(unrounded, name=f"{unrounded.name}, unrounded")
        return Blame(True, where, name, op, low, cause + advice, found, (*given, before), scale)
    if found.dtype != "float32":
        return Blame(True, where, name, op, dtype, f"overflow of {found.dtype}{advice}", found, inputs, scale)
    if found.nans:
        cause = "NaN from finite inputs: it has no result for some of them, as 0/0 or the root of a negative number"
    else:
        cause = (
            f"inf in FP32 from finite inputs: a division by zero, a logarithm of zero, or beyond FP32's range{advice}"
        )
    return Blame(True, where, name, op, "float32", cause, found, inputs, scale)


def _rounded(unrounded: Range, low: str) -> str:
    return f"overflow: {unrounded.largest:.4g} is rounded to {low}, which ends at {FORMATS[low].largest:.5g}"


def _unrounded(past: Sequence[Met], seen: Seen, found: Range) -> Range | None:
    """What a cast of ours read: the tensor of its name, or, added up, the last one."""
    if found.dtype == "float32":
        return None
    same = [m.range for m in past if m.range.shape == found.shape and m.range.dtype == "float32"]
    labels = ("the gradient of the loss",) if seen.enters else (seen.label, SUM)
    return next((r for r in reversed(same) if r.name in labels), None)


def _inputs(past: Sequence[Met], wiring: Wiring, seen: Seen) -> tuple[Range, ...]:
    """What the operator was given: by its inputs' names, and in backward by those of the gradients sent to it."""
    known = {m.range.name: m.range for m in past}
    arrived = [r for name, r in known.items() if seen.backward and name.endswith(f" -> {seen.operator}")]
    names = [wiring.name(entry.node) for entry in wiring.inputs(seen.operator)]
    given = [
        r for name, r in known.items() if name.startswith(("the input", "input ")) and not set(names) <= set(known)
    ]
    return tuple(dict.fromkeys([*arrived, *given, *(known[name] for name in names if name in known)]))


def _lower(scale: float) -> str:
    return "A lower loss scale avoids it" if scale > 1 else "The loss scale is 1, and not the cause"
