"""Stand-ins for operators that only the user's process knows: Custom ones, and those of libraries that it loaded.

Such an operator computes in FP32 under every plan. Where plans are measured, a differentiable graph of MXNet's own
operators takes its place that reads the same tensors and returns tensors of the same shapes.
"""

from __future__ import annotations

import json
from math import prod
from typing import Iterator, Mapping

from ..precision.casts import FULL, MARK
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import RULES
from ..precision.subgraphs import bodies

__all__ = ["note_shapes", "put_stand_ins"]

_SHAPES = "__mxmp_shapes__"
_PYTHON = ("Custom", "_npi_Custom", "_NDArray", "_Native")


def note_shapes(graph: Graph, shapes: Mapping[Entry, tuple[int, ...]]) -> tuple[str, ...]:
    """Note on each such operator the shapes that it returns, in place; return their types and names, for a text.

    Raises
    ------
    ValueError
        One stands in the body of a loop, whose shapes are not known here.
    """
    found = []
    for node in graph.nodes():
        for inner in _within(node):
            raise ValueError(
                f"{inner.op} {inner.name!r} in the body of {node.name!r} is known to this process alone, and tune "
                "measures in a process of its own: plan without measuring, by measure=False"
            )
        if _is_unknown(node):
            returned = {entry.index: shape for entry, shape in shapes.items() if entry.node is node}
            node.attrs[_SHAPES] = json.dumps(returned)
            for entry in node.inputs:
                if entry.node.is_variable:  # a stand-in does not tell the shapes that it needs
                    entry.node.attrs["__shape__"] = str(shapes[entry])
            found.append(f"{node.attrs.get('op_type', node.op)} {node.name!r}")
    return tuple(found)


def put_stand_ins(graph: Graph) -> dict[Node, Node]:
    """Put stand-ins in the place of operators with noted shapes; return each new node and what it stands for."""
    made: dict[Node, Node] = {}
    for node in [each for each in graph.nodes() if _SHAPES in each.attrs]:
        for index, shape in json.loads(node.attrs[_SHAPES]).items():
            returned = _stand_in(node, tuple(shape), made)
            for user in graph.nodes():
                user.inputs = [returned if _is_output(each, node, int(index)) else each for each in user.inputs]
            graph.heads = [returned if _is_output(each, node, int(index)) else each for each in graph.heads]
    return made


def _is_output(entry: Entry, node: Node, index: int) -> bool:
    return entry.node is node and entry.index == index


def _stand_in(node: Node, shape: tuple[int, ...], made: dict[Node, Node]) -> Entry:
    """Return the sum of all that ``node`` reads, in this shape; note the new nodes in ``made``."""

    def new(op: str, inputs: list[Entry], **attrs: str) -> Entry:
        each = Node(op, f"{node.name}_stand_in{len(made)}", {**attrs, MARK: "copy"}, inputs)
        made[each] = node
        return Entry(each)

    if not node.inputs:
        return new("_ones", [], shape=str(shape), dtype=FULL)
    read = [new("sum", [new("Cast", [entry], dtype=FULL)]) for entry in node.inputs]
    one = new("Reshape", [new("add_n", read, num_args=str(len(read)))], shape=str((1,) * len(shape)))
    return new("broadcast_to", [one], shape=str(shape)) if prod(shape) > 1 else one


def _is_unknown(node: Node) -> bool:
    return not node.is_variable and (node.op in _PYTHON or node.op not in RULES)


def _within(node: Node) -> Iterator[Node]:
    """Yield those in the bodies of a node of control flow."""
    for body in bodies(node):
        for inner in body.graph.nodes():
            if _is_unknown(inner):
                yield inner
            yield from _within(inner)
