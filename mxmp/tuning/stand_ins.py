"""Stand-ins for operators that only the user's process knows: Custom ones, and those of libraries that it loaded.

Such an operator computes in FP32; where plans are measured, operators of MXNet's own take its place, with gradients.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, Iterator, Mapping

import mxnet as mx

from ..precision.casts import FULL, IN_PYTHON, MARK
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import RULES

_SHAPES = "__mxmp_shapes__"


def described(symbol: mx.sym.Symbol, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, list[str], list[str]]:
    """Return JSON for another process, and the titles of the operators that only this one can run.
    Two lists: of those outside of loops and conditions, and of those in their bodies, which get no stand-ins."""
    text = symbol.tojson(remove_amp_cast=False)
    raw = json.loads(text)
    unknown = {number: node for number, node in enumerate(raw["nodes"]) if _runs_here_only(node)}
    inside = [_title(node) for node in _in_bodies(raw)]
    if not unknown:
        return text, [], inside
    internals = symbol.get_internals()
    entries = json.loads(internals.tojson(remove_amp_cast=False))["heads"]
    known = {tuple(entry[:2]): shape for entry, shape in zip(entries, internals.infer_shape_partial(**shapes)[1])}
    for number, node in unknown.items():
        returned = {index: shape for (maker, index), shape in known.items() if maker == number}
        node.setdefault("attrs", {})[_SHAPES] = json.dumps(returned)
        for maker, *_ in node["inputs"]:
            if raw["nodes"][maker]["op"] == "null":  # MXNet cannot infer its shape from a stand-in
                raw["nodes"][maker].setdefault("attrs", {})["__shape__"] = str(known[maker, 0])
    return json.dumps(raw), [_title(node) for node in unknown.values()], inside


def with_stand_ins(graph: Graph) -> Graph:
    """Return a copy with stand-ins, or ``graph`` if it needs none: right in shapes, so for timing alone."""
    if not any(map(needs_stand_in, graph.nodes())):
        return graph
    copy = graph.copy()
    put_stand_ins(copy)
    return copy


def needs_stand_in(node: Node) -> bool:
    return _SHAPES in node.attrs


def put_stand_ins(graph: Graph) -> dict[Node, Node]:
    """Replace the operators that ``described`` marked, in place; return which, by each new node."""
    made: dict[Node, Node] = {}
    for node in list(filter(needs_stand_in, graph.nodes())):
        outputs = json.loads(node.attrs[_SHAPES]).items()
        returned = {int(index): _stand_in(node, tuple(shape), made) for index, shape in outputs}
        for user in list(graph.nodes()):
            user.inputs = [returned[each.index] if each.node is node else each for each in user.inputs]
        graph.heads = [returned[each.index] if each.node is node else each for each in graph.heads]
    return made


def _stand_in(node: Node, shape: tuple[int, ...], made: dict[Node, Node]) -> Entry:
    """Return a tensor in place of an output of ``node``: each element the sum of all inputs. Adds to ``made``."""

    def new(op: str, inputs: list[Entry], **attrs: str) -> Entry:
        each = Node(op, f"{node.name}_stand_in{len(made)}", {**attrs, MARK: "copy"}, inputs)
        made[each] = node
        return Entry(each)

    if not node.inputs:
        return new("_ones", [], shape=str(shape), dtype=FULL)
    read = [new("sum", [new("Cast", [entry], dtype=FULL)]) for entry in node.inputs]
    one = new("Reshape", [new("add_n", read, num_args=str(len(read)))], shape=str((1,) * len(shape)))
    return new("broadcast_to", [one], shape=str(shape)) if prod(shape) > 1 else one


def _runs_here_only(node: Mapping[str, Any]) -> bool:
    """Return True for a Custom operator, or one of a library that ``mx.library`` loaded."""
    op = node["op"]
    return op != "null" and (op in IN_PYTHON or op not in RULES)


def _title(node: Mapping[str, Any]) -> str:
    """Return type and name for a message, ``"my_op 'custom0'"``."""
    return f"{node.get('attrs', {}).get('op_type', node['op'])} {node['name']!r}"


def _in_bodies(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what another process cannot run in bodies of loops and conditions, at any depth."""
    for body in [body for node in raw["nodes"] for body in node.get("subgraphs", ())]:
        yield from filter(_runs_here_only, body["nodes"])
        yield from _in_bodies(body)
