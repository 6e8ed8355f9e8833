"""Loss heads inside plain hybridized blocks, which a recorded graph shows as one opaque node.

Such a head ignores the loss scale, and nothing in the record leads to the block. So the blocks are looked
for among the objects that are alive, and matched with the nodes of the record.
"""

from __future__ import annotations

import gc
import weakref

import mxnet as mx
from mxnet.gluon import HybridBlock

from ..precision.graph import Node
from ..precision.heads import has_heads, refuse_unscaled_heads
from ..precision.record import Record
from . import _mxnet
from .hook import hook_of

__all__ = ["refuse_heads"]

_OPAQUE = "_CachedOp"


def refuse_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` where losses come from a loss head that ``scale`` would not reach, seen or hidden."""
    if scale != 1.0:
        refuse_unscaled_heads(record, scale)
        _refuse_opaque_heads(record, scale)


def _refuse_opaque_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` where losses may come from a loss head inside a plain hybridized block.

    A block with parameters is recognised by them, one without by its number of inputs only: where such a
    block is alive, another with as many inputs is refused with it. Costs about a millisecond, and nothing
    where no hybridized block was recorded.
    """
    if _OPAQUE not in record.operators:
        return
    blocks = [block for block in _live_blocks() if _has_bare_head(block)]
    for node in record.nodes() if blocks else ():
        for block in blocks:
            if node.op == _OPAQUE and _may_be(node, block):
                raise ValueError(
                    f"{block.name!r} is hybridized and ends in a loss head that ignores the loss scale {scale:g}, "
                    f"by which the update would divide: mxmp.convert({block.name}), or use loss_scale=None"
                )


_known: weakref.WeakSet[HybridBlock] = weakref.WeakSet()
_scanned = -1


def _live_blocks() -> list[HybridBlock]:
    """Every HybridBlock that is alive.

    What was made since the last look is in Python's two young generations, unless a collection has moved
    it to the old one: only then is that looked through too.
    """
    global _scanned
    collections = sum(generation["collections"] for generation in gc.get_stats()[1:])
    for generation in (0, 1) if collections == _scanned else (0, 1, 2):
        for item in gc.get_objects(generation=generation):
            if issubclass(type(item), HybridBlock):
                _known.add(item)
    _scanned = collections
    return list(_known)


_heads: weakref.WeakKeyDictionary[HybridBlock, tuple[int, bool]] = weakref.WeakKeyDictionary()


def _has_bare_head(block: HybridBlock) -> bool:
    """Whether it is a plain block whose own graph, as last traced, has a loss head."""
    if not _mxnet.is_active(block) or _mxnet.cached_op(block) is None or hook_of(block) is not None:
        return False
    symbol = _mxnet.traced(block).graph[1]
    if _heads.get(block, (0, False))[0] != id(symbol):
        _heads[block] = (id(symbol), has_heads(symbol))
    return _heads[block][1]


def _may_be(node: Node, block: HybridBlock) -> bool:
    """Whether the recorded node can be a call of the block."""
    params = [param for is_data, param in _mxnet.traced(block).op_args if not is_data]
    if len(node.inputs) != len(_mxnet.traced(block).op_args):
        return False
    names = {entry.node.name for entry in node.inputs}
    trained = [array for param in params if param.grad_req != "null" for array in _mxnet.arrays(param)[:1]]
    marked = [mx.autograd.get_symbol(array).name for array in trained]
    return not marked or any(name in names for name in marked)
