"""A plan in the names of another net of the same code, whose blocks have other numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from glob import escape
from typing import Callable, Iterable, Sequence

from ..policy import pattern_of
from .plan import Plan


def renamed(plan: Plan, blocks: Sequence[str]) -> Plan:
    """Return ``plan`` with the names of another net of the same code, or unchanged where they cannot be changed.
    ``blocks`` are the other net's prefixes, in the order of ``plan.blocks``. ``check_fit`` says whether it fits."""
    # Gluon numbers the blocks of a process: "dense0_fwd" of one net is "dense2_fwd" in the next.
    pairs = {(old, new) for old, new in zip(plan.blocks, blocks) if old and new}
    prefixes = dict(pairs)
    one_to_one = len(pairs) == len(prefixes) == len(set(prefixes.values()))
    if tuple(blocks) == plan.blocks or len(blocks) != len(plan.blocks) or not prefixes or not one_to_one:
        return plan
    # A name in the body of a loop stands after a slash. The longest prefix is that of the innermost block.
    longest_first = sorted(prefixes, key=len, reverse=True)
    known = re.compile(f"(^|/)({'|'.join(map(re.escape, longest_first))})")

    def rename(name: str) -> str:
        # ``"n0_loop/n0_dense0_fwd"`` becomes ``"n1_loop/n1_dense0_fwd"`` if the block ``n0_`` is now ``n1_``.
        return known.sub(lambda found: found[1] + prefixes[found[2]], name)

    decisions = {rename(name): decision for name, decision in plan.decisions.items()}
    if len(decisions) != len(plan.decisions):
        return plan
    nodes = [re.sub(r":\d+$", "", name.rpartition("/")[2]) for name in plan.decisions]
    blocks_by_name = [old[:-1] for old, new in prefixes.items() if old.endswith("_") and new.endswith("_")]
    names = dict.fromkeys([*blocks_by_name, *nodes])
    excluded = {pattern: _renamed_pattern(pattern, names, rename) for pattern in plan.policy.exclude}
    return replace(
        plan,
        policy=replace(plan.policy, exclude=tuple(dict.fromkeys(new for found in excluded.values() for new in found))),
        decisions=decisions,
        low_variables=frozenset(map(rename, plan.low_variables)),
        unmatched=tuple(new for pattern in plan.unmatched for new in excluded.get(pattern, ())),
        blocks=tuple(blocks),
    )


def _renamed_pattern(pattern: str, names: Iterable[str], rename: Callable[[str], str]) -> list[str]:
    """Return patterns that match the new names of exactly those of ``names`` that ``pattern`` matches."""
    # ``rename`` needs an underscore behind a name. One pattern is enough if it fits as it is ("*head*"), or with the
    # new prefix of a block ("net1_*" for "net0_*").
    new = re.sub("_$", "", rename(pattern + "_"))
    before, after = pattern_of(pattern), pattern_of(new)
    if all(bool(before.match(name)) == bool(after.match(rename(name + "_")[:-1])) for name in names):
        return [new]
    return [escape(rename(name + "_")[:-1]) for name in names if before.match(name)]
