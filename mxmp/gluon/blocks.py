"""The blocks of a net: which of them ``convert`` runs as graphs, and a plan with the names of this net's operators."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Callable, NamedTuple, Sequence

from mxnet.gluon import Block, HybridBlock

from ..policy import Policy
from ..precision.plan import Plan, renamed
from . import _mxnet


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Return the HybridBlocks among ``net`` and all blocks inside it, each once, depth first from the outermost."""
    return [block for block in blocks_of(net) if isinstance(block, HybridBlock)]


def blocks_of(net: Block) -> list[Block]:
    """Return ``net`` and all blocks inside it, each once, depth first from the outermost."""
    found: dict[int, Block] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())


def prefixes_of(net: Block) -> tuple[str, ...]:
    """Return the name prefixes of ``net`` and all blocks inside it, ``("net0_", "net0_dense0_")``, outermost first."""
    return tuple(block.prefix for block in blocks_of(net))


class Division(NamedTuple):
    """Which blocks of a net ``convert`` runs as graphs, and which as Python code. Each list begins with the outermost.

    A Block that is no HybridBlock, and neither excluded nor around or inside an excluded one, is in ``blocks`` alone.

    Attributes
    ----------
    blocks : list of Block
        The net itself, and all blocks inside it.
    graphs : list of HybridBlock
        The HybridBlocks in neither ``python`` nor ``outside``: the ``roots``, and blocks inside them, which run as
        parts of the roots' graphs.
    roots : list of HybridBlock
        Those of ``graphs`` that Python code calls: the net itself, or the children of blocks that are not in
        ``graphs``.
    python : list of Block
        Blocks that the user excluded, and all blocks around them: their ``forward`` runs as Python code, in FP32.
    outside : list of Block
        Blocks inside an excluded block, which are not converted.
    """

    blocks: list[Block]
    graphs: list[HybridBlock]
    roots: list[HybridBlock]
    python: list[Block]
    outside: list[Block]


def divide(net: Block, exclude: Policy | Callable[[str, Block], bool]) -> Division:
    """Return which blocks of ``net`` run as low-precision graphs and which as Python code, as a ``Division``.

    ``exclude`` is a filter or a policy. A filter ``(name, block) -> bool`` returns True for a block that is to run as
    Python code. A policy excludes a block if the block's class is from outside MXNet (a user's or GluonCV's) and a
    pattern of ``policy.exclude`` that does not end in ``*`` matches the block's name. The blocks around and inside an
    excluded block run as Python code, too. Raises ``ValueError`` if no HybridBlock is left to run as a graph.
    """
    is_excluded = exclude if callable(exclude) else _filter_of(exclude)
    python: set[int] = set()
    outside: set[int] = set()

    def runs_as_python(block: Block) -> bool:
        # Also adds ids of ``block`` and the blocks inside it to ``python``, for those that are excluded or contain an
        # excluded block, or else to ``outside``, for those that are inside an excluded block.
        excluded = is_excluded(block.name, block)
        if excluded:
            outside.update(id(inner) for inner in blocks_of(block) if inner is not block)
        if excluded or True in [runs_as_python(child) for child in _mxnet.children(block)]:
            python.add(id(block))
        return id(block) in python

    def roots(block: Block) -> list[HybridBlock]:
        # A block that several others share may occur more than once.
        if id(block) in outside:
            return []
        if isinstance(block, HybridBlock) and id(block) not in python:
            return [block]
        return [found for child in _mxnet.children(block) for found in roots(child)]

    runs_as_python(net)
    blocks = blocks_of(net)
    graphs = [each for each in blocks if isinstance(each, HybridBlock) and id(each) not in python | outside]
    if not graphs:
        why = "the filter excludes every one" if python else "only those have a graph to rewrite"
        raise ValueError(f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock ({why})")
    return Division(
        blocks,
        graphs,
        list(dict.fromkeys(roots(net))),
        [each for each in blocks if id(each) in python and id(each) not in outside],
        [each for each in blocks if id(each) in outside],
    )


def _filter_of(policy: Policy) -> Callable[[str, Block], bool]:
    """Return a filter ``(name, block) -> bool``: True if the block is to run as Python code under ``policy``.

    The filter is True for a block whose class is from outside MXNet, if a pattern of ``policy.exclude`` that does not
    end in ``*`` matches the block's name. The code of that class may do what no graph can, such as branch on an array's
    values. MXNet's own layers can all be traced. A pattern that matches the name of such a layer keeps the layer's
    operators in FP32 within the graph, and so does a pattern that ends in ``*``, whatever the class of the block.
    """
    patterns = [pattern for pattern in policy.exclude if not pattern.endswith("*")]

    def is_named(name: str, block: Block) -> bool:
        return not type(block).__module__.startswith("mxnet.") and any(fnmatchcase(name, p) for p in patterns)

    return is_named


def with_names_of(blocks: Sequence[Block], plan: Plan) -> Plan:
    """Return ``plan`` with the names of the net whose blocks are ``blocks``, so that it can be used for this net.

    The plan was made for another net, which the same code built. Gluon numbers all blocks that a process makes, so the
    operators of the two nets have different names. ``blocks`` is ``blocks_of(net)``. While the outermost block is no
    HybridBlock and has one child, its child takes its place. ``plan`` is returned as it is if the names are the same,
    ``plan.blocks`` is empty, the nets differ in their number of blocks, or two names would become one.
    """
    start = 0
    while not isinstance(blocks[start], HybridBlock) and len(_mxnet.children(blocks[start])) == 1:
        start += 1
    return renamed(plan, tuple(block.prefix for block in blocks[start:]))
