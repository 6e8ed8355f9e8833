"""Errors for recorded loss heads that the loss scale does not reach: those outside any converted block.

A plain hybridized block is one ``_CachedOp`` node in a recorded graph, and a head inside it ignores the loss scale.
What is in the node cannot be read, but MXNet shows which gradients from above its backward reads. A block that reads
none for those of its outputs that are used writes gradients of its own, and so does one with an output that is named
after a head and whose gradient it does not read.

A head cannot be found where the block also passes a gradient from above on, and the head is no output of the block
or the user has named it.
"""

from __future__ import annotations

import re
from typing import Iterable

from mxnet.ndarray import NDArray

from ..precision.graph import Node
from ..precision.heads import HEAD_OPERATORS, is_unscaled
from .record import Record, recorded_name
from .scaling import is_converted

__all__ = ["refuse_hidden_heads", "refuse_unscaled_heads"]

# MXNet names an output after its operator, unless the user has named it.
_HEAD = re.compile(rf"({'|'.join(op.lower() for op in HEAD_OPERATORS)})\d*_output\d*$")
# Operators through which no gradient goes: a block that ends in one writes zeros.
_NO_GRADIENT = re.compile(
    r"(blockgrad|stop_gradient|(zeros|ones|arange)_like|arg(max|min|sort)|topk|one_hot|(equal|greater|lesser)(_?scalar)?"
    r"|logical_(and|or|xor|not)|round|rint|floor|ceil|trunc|fix|sign|multibox(prior|target|detection)|proposal|box_nms"
    r"|shape_array)\d*_output\d*$"
)


def refuse_unscaled_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` for a recorded head that would write unscaled gradients.

    For what is inside a plain hybridized block see ``refuse_hidden_heads``. Takes 0.7 ms for a ResNet-50.
    """
    if HEAD_OPERATORS.isdisjoint(record.operators):
        return
    for node in record.nodes():
        if is_unscaled(node):
            raise ValueError(
                f"{node.op} writes its own gradient and ignores the loss scale {scale:g}, by which the update "
                "would divide: put it inside a net that goes through mxmp.convert, or use loss_scale=None"
            )


def refuse_hidden_heads(record: Record, scale: float, trained: Iterable[NDArray]) -> None:
    """Raise ``ValueError`` where a plain hybridized block gives ``trained`` gradients that ``scale`` does not reach.

    ``trained``: arrays with a gradient, of parameters that the next step updates. Costs nothing where no hybridized
    block was recorded.
    """
    if "_CachedOp" not in record.operators:
        return
    hidden = record.hidden_outputs(is_converted)
    if all(reads for outputs in hidden.values() for reads in outputs.values()):
        return
    used = record.read_entries()
    for node in list(record.nodes()):
        if node.name not in hidden:
            continue
        outputs = list(hidden[node.name].items())
        reached = [outputs[i] for i in range(len(outputs)) if (node.name, i) in used]
        named = [name for name, reads in outputs if not reads and _HEAD.search(name)]
        if not named and any(reads or _NO_GRADIENT.search(name) for name, reads in reached):
            continue
        if not _leaves(node).isdisjoint(map(recorded_name, trained)):
            names = ", ".join(name[len(node.name) + 1 :] for name in named or dict(reached))
            raise ValueError(
                f"a hybridized block (its output: {names}) ignores the gradient from above, and with it the loss "
                f"scale {scale:g}, by which the update would divide: it has a loss head inside. Convert it with "
                "mxmp.convert(block), or use loss_scale=None; if its output is to have no gradient, call the block "
                "within autograd.pause()"
            )


def _leaves(node: Node) -> set[str | None]:
    """Return the names of all variables that the node reads, itself or through other nodes."""
    met: set[Node] = {node}
    stack = [node]
    while stack:
        below = {entry.node for entry in stack.pop().inputs} - met
        met |= below
        stack += below
    return {each.name for each in met if each.is_variable}
