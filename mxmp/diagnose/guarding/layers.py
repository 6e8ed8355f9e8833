"""From the tensor that overflowed to the operators that must leave low precision so that it does not."""

from __future__ import annotations

from typing import Collection, Iterable

from ...precision.graph import Entry, Node
from ...precision.plan import rule_under
from ...precision.rules import Kind
from ..blaming.verdict import Met
from ..watching.wiring import Wiring

__all__ = ["layer_at_fault"]


def layer_at_fault(wiring: Wiring, first: Met, params: Collection[str], *, with_followers: bool) -> list[str]:
    """Names of low operators, in graph order, for the first tensor that was not finite; none where FP32 went wrong.

    The operator that made the tensor; where that is FP32, or no operator, those that are handed it rounded. With each
    go those of its kind that share a parameter with it, such as the other steps of an unrolled cell.
    ``with_followers``: and those behind them that follow their inputs by the rules, where a Plan decides.
    """
    fault = [node for node in _at_fault(wiring, first) if wiring.is_low(node)]
    layer = dict.fromkeys(found for node in fault for found in _sharing(wiring, node, params))
    if with_followers:
        layer.update(dict.fromkeys(_followers(wiring, layer)))
    return list(dict.fromkeys(wiring.name(node) for node in wiring.operators if node in layer))


def _at_fault(wiring: Wiring, first: Met) -> list[Node]:
    seen, found = first
    if seen is None:  # a parameter that is stored low, whose master is finite
        return wiring.readers_of(found.name) if found.dtype != "float32" else []
    if seen.node not in wiring:  # another graph's; or a sum of gradients, and MXNet does not tell whose
        return []
    made = [node for node in wiring.operators if wiring.name(node) == seen.operator]
    if any(map(wiring.is_low, made)) or not seen.ours:
        return made
    return [wiring.source(Entry(seen.node)).node] if seen.backward else wiring.readers(seen.node)


def _sharing(wiring: Wiring, node: Node, params: Collection[str]) -> Iterable[Node]:
    own = _parameters(wiring, node, params)
    yield node
    for other in wiring.operators:
        if (
            wiring.kind(other) == wiring.kind(node)
            and wiring.is_low(other)
            and not own.isdisjoint(_parameters(wiring, other, params))
        ):
            yield other


def _parameters(wiring: Wiring, node: Node, params: Collection[str]) -> set[str]:
    return {source.node.name for e in node.inputs if (source := wiring.source(e)).node.name in params}


def _followers(wiring: Wiring, layer: Iterable[Node]) -> Iterable[Node]:
    stack, met = list(layer), set(layer)
    while stack:
        for reader in wiring.readers(stack.pop()):
            follows = rule_under(wiring.plan.policy, wiring.kind(reader)).kind is Kind.FOLLOW
            if reader not in met and follows and wiring.is_low(reader):
                met.add(reader)
                stack.append(reader)
                yield reader
