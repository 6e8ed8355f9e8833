"""What is expected of a conversion as a whole: something computes low, and every pattern matches something."""

from __future__ import annotations

import logging
import warnings
from typing import Iterable, Mapping

import mxnet as mx
from mxnet.gluon import HybridBlock

from ..precision.graph import Graph
from ..precision.plan import Plan
from ..precision.traffic import remedy

__all__ = ["Expected"]

logger = logging.getLogger("mxmp")


class Expected:
    """Warns where it is not met, once every block of ``roots`` has a graph."""

    def __init__(self, net: str, roots: Iterable[HybridBlock], patterns: Iterable[str]) -> None:
        self._net = net
        self._waiting = {id(block) for block in roots}
        self._unmatched = dict.fromkeys(patterns)
        self._any_low = False
        self._told_of_casts = False

    def note(self, block: HybridBlock, plan: Plan) -> None:
        """A graph of ``block`` follows ``plan``."""
        if id(block) not in self._waiting:
            return
        self._waiting.discard(id(block))
        self._unmatched = {pattern: None for pattern in self._unmatched if pattern in plan.unmatched}
        self._any_low = self._any_low or plan.num_low > 0
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

    def note_casts(self, block: HybridBlock, symbol: mx.sym.Symbol, plan: Plan, shapes: Mapping[str, tuple]) -> None:
        """Log, once for the conversion, that another policy would cast much less, at the first call's shapes."""
        if not self._told_of_casts:
            found = remedy(Graph.from_symbol(symbol), plan, shapes)
            if found:
                self._told_of_casts = True
                logger.warning("%r: %s, in every forward", block.name, found)
