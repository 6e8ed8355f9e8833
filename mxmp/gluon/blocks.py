"""The blocks of a net: how a conversion divides them, and plans under the names that they have here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Callable, NamedTuple

from mxnet.gluon import Block, HybridBlock

from ..policy import Policy
from ..precision.plan import Plan, renamed
from . import _mxnet

__all__ = ["Division", "blocks_of", "divide", "hybrid_blocks", "prefixes_of", "with_names_of"]


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Return every HybridBlock of the tree once, outermost first."""
    return [block for block in blocks_of(net) if isinstance(block, HybridBlock)]


def blocks_of(net: Block) -> list[Block]:
    """Return every block of the tree once, outermost first."""
    found: dict[int, Block] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())


def prefixes_of(net: Block) -> tuple[str, ...]:
    """Return the prefix of the names in each block of the tree, outermost first."""
    return tuple(block.prefix for block in blocks_of(net))


class Division(NamedTuple):
    """How a conversion divides the blocks of a net; each list is outermost first.

    Attributes
    ----------
    graphs : list of HybridBlock
        Those that run as graphs.
    roots : list of HybridBlock
        Those of ``graphs`` that no other one contains.
    python : list of Block
        Those that run as Python, in FP32: the excluded ones, and all that contain one.
    outside : list of Block
        What the excluded ones contain. It is not converted.
    """

    graphs: list[HybridBlock]
    roots: list[HybridBlock]
    python: list[Block]
    outside: list[Block]


def divide(net: Block, exclude: Policy | Callable[[str, Block], bool]) -> Division:
    """Return how a conversion divides ``net``. ``exclude``: a filter, or a policy whose patterns may name blocks.

    Raises
    ------
    ValueError
        No HybridBlock is left to run as a graph.
    """
    is_excluded = exclude if callable(exclude) else _names_own_blocks(exclude)
    python: set[int] = set()
    outside: set[int] = set()

    def runs_as_python(block: Block) -> bool:
        excluded = is_excluded(block.name, block)
        if excluded:
            outside.update(id(inner) for inner in blocks_of(block) if inner is not block)
        if excluded or True in [runs_as_python(child) for child in _mxnet.children(block)]:
            python.add(id(block))
        return id(block) in python

    def roots(block: Block) -> list[HybridBlock]:
        if id(block) in outside:
            return []
        if isinstance(block, HybridBlock) and id(block) not in python:
            return [block]
        return [found for child in _mxnet.children(block) for found in roots(child)]

    runs_as_python(net)
    blocks = blocks_of(net)
    graphs = [each for each in hybrid_blocks(net) if id(each) not in python | outside]
    if not graphs:
        why = "the filter excludes every one" if python else "only those have a graph to rewrite"
        raise ValueError(f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock ({why})")
    return Division(
        graphs,
        list(dict.fromkeys(roots(net))),
        [each for each in blocks if id(each) in python and id(each) not in outside],
        [each for each in blocks if id(each) in outside],
    )


def _names_own_blocks(policy: Policy) -> Callable[[str, Block], bool]:
    """Return the filter for blocks of a user's own class that a pattern of the policy names.

    They may do what no graph can. MXNet's layers can be traced: they stay in the graph, in FP32, and so do nodes that
    a pattern ending in * matches.
    """
    patterns = [pattern for pattern in policy.exclude if not pattern.endswith("*")]

    def names(name: str, block: Block) -> bool:
        return not type(block).__module__.startswith("mxnet.") and any(fnmatchcase(name, p) for p in patterns)

    return names


def with_names_of(net: Block, plan: Plan) -> Plan:
    """Return the plan for ``net``, which the same code may have built under other numbers, or in another process."""
    outermost = net
    while not isinstance(outermost, HybridBlock) and len(_mxnet.children(outermost)) == 1:
        outermost = _mxnet.children(outermost)[0]
    return renamed(plan, prefixes_of(outermost))
