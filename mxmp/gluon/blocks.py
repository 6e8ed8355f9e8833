"""The blocks of a net, and what their names begin with."""

from __future__ import annotations

from mxnet.gluon import Block, HybridBlock

from ..precision.plan import Plan
from ..precision.renamed import renamed
from . import _mxnet

__all__ = ["blocks_of", "hybrid_blocks", "prefixes_of", "with_names_of"]


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
