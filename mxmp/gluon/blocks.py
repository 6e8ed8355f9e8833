"""The blocks of a net: which of them ``convert`` runs as graphs, and a plan with the names of this net's operators."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Callable, NamedTuple, Sequence

from mxnet.gluon import Block, HybridBlock
from mxnet.gluon.rnn import RecurrentCell

from ..policy import Policy
from ..precision.plan import Plan
from . import _mxnet


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Return the HybridBlocks among ``net`` and all blocks inside, each once, depth first from the outermost."""
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
    """Return the name prefixes of ``blocks_of(net)``: ``("net0_", "net0_dense0_")``."""
    return tuple(block.prefix for block in blocks_of(net))


class Division(NamedTuple):
    """Which blocks of a net run as graphs, and which as Python code; each list begins with the outermost.
    A plain Block that is neither excluded nor around or inside an excluded one is in ``blocks`` alone."""

    # The net itself, and all blocks inside it.
    blocks: list[Block]
    # The HybridBlocks neither in ``python`` nor inside an excluded block: the ``roots``, and blocks inside, as parts of
    # their graphs.
    graphs: list[HybridBlock]
    # Those of ``graphs`` that Python code calls: the net, or children of blocks that are not in ``graphs``.
    roots: list[HybridBlock]
    # Blocks that the user excluded, and all around them; cells that keep arrays from step to step, unless within a
    # graph: their ``forward`` runs as Python code, in FP32.
    python: list[Block]


def divide(net: Block, exclude: Policy | Callable[[str, Block], bool]) -> Division:
    """Return which blocks run as graphs; those that ``exclude`` names, and all around and inside, run as Python code.
    ``exclude`` is a filter ``(name, block) -> bool``, or a policy (``_filter_of``). Raises ``ValueError`` if no
    HybridBlock is left to run as a graph."""
    is_excluded = exclude if callable(exclude) else _filter_of(exclude)
    blocks = blocks_of(net)
    inside = {id(block): set(map(id, blocks_of(block))) for block in blocks}
    excluded = {id(block) for block in blocks if is_excluded(block.name, block)}
    outside = {inner for each in excluded for inner in inside[each] - {each}}
    python = [each for each in blocks if inside[id(each)] & excluded and id(each) not in outside]
    not_graphs = outside.union(map(id, python))
    graphs = [each for each in blocks if isinstance(each, HybridBlock) and id(each) not in not_graphs]
    keeping = {id(each) for each in graphs if isinstance(each, _mxnet.KEEPING_CELLS)}
    roots = _roots(blocks, graphs, outside)
    # Called step by step, a graph would need what such a cell has kept as an array; within a graph it is a Symbol.
    while cells := [each for each in roots if isinstance(each, RecurrentCell) and inside[id(each)] & keeping]:
        python += cells
        graphs = [each for each in graphs if each not in cells]
        roots = _roots(blocks, graphs, outside)
    if not graphs:
        why = (
            "the filter excludes every one: convert the parts inside by themselves"
            if python
            else "only those have a graph: derive its blocks from one, and write hybrid_forward(self, F, x, weight) in "
            "place of forward(self, x)"
        )
        raise ValueError(f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock ({why})")
    return Division(blocks, graphs, roots, python)


def _roots(blocks: Sequence[Block], graphs: Sequence[HybridBlock], outside: set[int]) -> list[HybridBlock]:
    """Return those of ``graphs`` that Python code calls: the first block, or a child of one that is no graph."""
    no_callers = outside.union(map(id, graphs))
    callers = [each for each in blocks if id(each) not in no_callers]
    called = {id(blocks[0]), *(id(child) for each in callers for child in _mxnet.children(each))}
    return [each for each in graphs if id(each) in called]


def _filter_of(policy: Policy) -> Callable[[str, Block], bool]:
    """Return a filter ``(name, block) -> bool``: True if the block is to run as Python code under ``policy``."""
    # Only code from outside MXNet may do what no graph can, such as branch on an array's values; MXNet's own layers can
    # be traced. Their name, or a pattern that ends in ``*``, keeps operators in FP32 within the graph.
    patterns = [pattern for pattern in policy.exclude if not pattern.endswith("*")]

    def is_named(name: str, block: Block) -> bool:
        return not type(block).__module__.startswith("mxnet.") and any(fnmatchcase(name, p) for p in patterns)

    return is_named


def with_names_of(blocks: Sequence[Block], plan: Plan) -> Plan:
    """Return ``plan``, made for another net of the same code, with the operator names of the net of ``blocks``.
    It stays as it is if the names are the same, or the two nets' blocks do not correspond."""
    from ..precision.renaming import renamed

    # Gluon numbers all blocks that a process makes. A container around one child has no part in the names.
    start = 0
    while not isinstance(blocks[start], HybridBlock) and len(_mxnet.children(blocks[start])) == 1:
        start += 1
    return renamed(plan, tuple(block.prefix for block in blocks[start:]))
