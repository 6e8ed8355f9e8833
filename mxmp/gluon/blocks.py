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
    """Return ``net`` and all blocks inside it that are HybridBlocks, each once, outermost first (depth first)."""
    return [block for block in blocks_of(net) if isinstance(block, HybridBlock)]


def blocks_of(net: Block) -> list[Block]:
    """Return ``net`` and all blocks inside it, each once, outermost first (depth first)."""
    found: dict[int, Block] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())


def prefixes_of(net: Block) -> tuple[str, ...]:
    """Return the name prefix (``"resnet0_"``) of ``net`` and of every block inside it, outermost first."""
    return tuple(block.prefix for block in blocks_of(net))


class Division(NamedTuple):
    """Which blocks of a net ``convert`` makes run as graphs, and which as Python; each list is outermost first.

    Attributes
    ----------
    graphs : list of HybridBlock
        Blocks that run as graphs, also those inside another one.
    roots : list of HybridBlock
        The blocks of ``graphs`` that are called from Python: no other block of ``graphs`` contains them.
    python : list of Block
        Blocks that run as Python, in FP32: the excluded ones, and all that contain an excluded one.
    outside : list of Block
        Blocks inside an excluded block. They are not converted.
    """

    graphs: list[HybridBlock]
    roots: list[HybridBlock]
    python: list[Block]
    outside: list[Block]


def divide(net: Block, exclude: Policy | Callable[[str, Block], bool]) -> Division:
    """Return which blocks of ``net`` run as graphs and which as Python.

    Parameters
    ----------
    net : mxnet.gluon.Block
    exclude : callable or Policy
        A filter ``(name, block) -> bool`` that is True for blocks to run as Python, or a policy with ``exclude``
        patterns: then blocks whose class is not MXNet's run as Python if a pattern matches their name.

    Raises
    ------
    ValueError
        No HybridBlock is left to run as a graph.
    """
    is_excluded = exclude if callable(exclude) else _names_own_blocks(exclude)
    python: set[int] = set()
    outside: set[int] = set()

    def runs_as_python(block: Block) -> bool:
        """Return whether ``block`` runs as Python, and record this for it and all blocks inside it."""
        excluded = is_excluded(block.name, block)
        if excluded:
            outside.update(id(inner) for inner in blocks_of(block) if inner is not block)
        if excluded or True in [runs_as_python(child) for child in _mxnet.children(block)]:
            python.add(id(block))
        return id(block) in python

    def roots(block: Block) -> list[HybridBlock]:
        """Return the outermost blocks in ``block``, or itself, that run as graphs; a shared one may occur twice."""
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
    """Return a filter ``(name, block) -> bool`` for blocks named in ``policy.exclude`` whose class is not MXNet's.

    Such a block may do what no graph can, so it runs as Python. MXNet's own layers can be traced: a pattern that names
    one keeps its operators in FP32 within the graph. So does a pattern that ends in ``*``, which is meant for
    operators.
    """
    patterns = [pattern for pattern in policy.exclude if not pattern.endswith("*")]

    def names(name: str, block: Block) -> bool:
        """Return whether ``block``, named ``name``, is named by a pattern and its class is not MXNet's."""
        return not type(block).__module__.startswith("mxnet.") and any(fnmatchcase(name, p) for p in patterns)

    return names


def with_names_of(net: Block, plan: Plan) -> Plan:
    """Return ``plan``, made for a net that the same code built, with the operator names of ``net``.

    Gluon numbers blocks in each process, so the same layer may be ``dense0`` where the plan was made and ``dense2``
    here. The plan is returned as it is if its blocks do not correspond to those of ``net``.
    """
    outermost = net
    while not isinstance(outermost, HybridBlock) and len(_mxnet.children(outermost)) == 1:
        outermost = _mxnet.children(outermost)[0]
    return renamed(plan, prefixes_of(outermost))
