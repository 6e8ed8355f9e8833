"""What is expected of a conversion as a whole: something computes low, and every pattern matches something."""

from __future__ import annotations

import warnings
from typing import Iterable

from mxnet.gluon import HybridBlock

from ..precision.plan import Plan

__all__ = ["Expected"]


class Expected:
    """Warns where it is not met, once every block of ``roots`` has a graph."""

    def __init__(self, net: str, roots: Iterable[HybridBlock], patterns: Iterable[str]) -> None:
        self._net = net
        self._roots = frozenset(id(block) for block in roots)
        self._waiting = set(self._roots)
        self._unmatched = dict.fromkeys(patterns)
        self._any_low = False

    def is_root(self, block: HybridBlock) -> bool:
        """Whether its graph is one of the net's own, not of a part of one."""
        return id(block) in self._roots

    def note(self, block: HybridBlock, plan: Plan) -> None:
        """A graph of ``block`` follows ``plan``."""
        if id(block) not in self._waiting:
            return
        self._waiting.discard(id(block))
        self._unmatched = {pattern: None for pattern in self._unmatched if pattern in plan.unmatched}
        # A tuned plan without low operators says that FP32 is faster.
        self._any_low = self._any_low or plan.num_low > 0 or plan.tuned is not None
        if self._waiting:
            return
        if not self._any_low:
            warnings.warn(
                f"nothing in {self._net!r} computes in {plan.policy.compute}: it has no matrix operator that may; "
                "print(mxmp.explain(net)) says why",
                stacklevel=5,
            )
        if self._unmatched:
            warnings.warn(f"exclude: no node or block of {self._net!r} matches {list(self._unmatched)}", stacklevel=5)
