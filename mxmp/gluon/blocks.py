"""The blocks of a net, what their names begin with, and plans for other names."""

from __future__ import annotations

import re
from dataclasses import replace
from glob import escape
from typing import Callable, Iterable, Sequence

from mxnet.gluon import Block, HybridBlock

from ..policy import Policy, pattern_of
from ..precision.plan import Plan
from . import _mxnet

__all__ = ["blocks_of", "hybrid_blocks", "prefixes_of", "renamed", "with_names_of"]


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Every HybridBlock of the tree once, outermost first."""
    return [block for block in blocks_of(net) if isinstance(block, HybridBlock)]


def blocks_of(net: Block) -> list[Block]:
    """Every block of the tree once, outermost first."""
    found: dict[int, Block] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())


def prefixes_of(net: Block) -> tuple[str, ...]:
    """Return what the names in each block of the tree begin with, outermost first."""
    return tuple(block.prefix for block in blocks_of(net))


def with_names_of(net: Block, plan: Plan) -> Plan:
    """Return the plan for ``net``, which the same code may have built under other numbers, or in another process."""
    outermost = net
    while not isinstance(outermost, HybridBlock) and len(_mxnet.children(outermost)) == 1:
        outermost = _mxnet.children(outermost)[0]
    return renamed(plan, prefixes_of(outermost))


def renamed(plan: Plan, blocks: Sequence[str]) -> Plan:
    """Return the plan with the names of a network whose blocks, in the order of ``plan.blocks``, have these prefixes.

    MXNet numbers blocks through the whole process, so what is ``dense0_`` here is ``dense2_`` in the next network of
    the same code. Whether the plan then fits is for ``check_fit`` to say. It is returned as it is where it does not
    know its blocks, has more or fewer of them, or where two of them would get one name.
    """
    pairs = {(old, new) for old, new in zip(plan.blocks, blocks) if old and new}
    prefixes = dict(pairs)
    one_to_one = len(pairs) == len(prefixes) == len(set(prefixes.values()))
    if tuple(blocks) == plan.blocks or len(blocks) != len(plan.blocks) or not prefixes or not one_to_one:
        return plan
    # A name in the body of a loop stands behind a slash. The longest prefix is that of the innermost block.
    longest_first = sorted(prefixes, key=len, reverse=True)
    known = re.compile(f"(^|/)({'|'.join(map(re.escape, longest_first))})")

    def rename(name: str) -> str:
        return known.sub(lambda found: found[1] + prefixes[found[2]], name)

    decisions = {rename(name): decision for name, decision in plan.decisions.items()}
    if len(decisions) != len(plan.decisions):
        return plan
    nodes = [re.sub(r":\d+$", "", name.rpartition("/")[2]) for name in plan.decisions]
    whole = [old[:-1] for old, new in prefixes.items() if old.endswith("_") and new.endswith("_")]
    names = dict.fromkeys([*whole, *nodes])
    excluded = {pattern: _renamed_pattern(pattern, names, rename) for pattern in plan.policy.exclude}
    return replace(
        plan,
        policy=_excluding_only(plan.policy, [new for found in excluded.values() for new in found]),
        decisions=decisions,
        low_variables=frozenset(map(rename, plan.low_variables)),
        unmatched=tuple(new for pattern in plan.unmatched for new in excluded.get(pattern, ())),
        blocks=tuple(blocks),
    )


def _excluding_only(policy: Policy, patterns: Iterable[str]) -> Policy:
    return replace(policy, exclude=tuple(dict.fromkeys(patterns)))


def _renamed_pattern(pattern: str, names: Iterable[str], rename: Callable[[str], str]) -> list[str]:
    """Return what matches the new names of what ``pattern`` matches: a pattern, or these names one by one."""
    new = re.sub("_$", "", rename(pattern + "_"))
    before, after = pattern_of(pattern), pattern_of(new)
    if all(bool(before.match(name)) == bool(after.match(rename(name + "_")[:-1])) for name in names):
        return [new]
    return [escape(rename(name + "_")[:-1]) for name in names if before.match(name)]
