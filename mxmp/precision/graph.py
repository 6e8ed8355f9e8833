"""A small graph over MXNet's Symbol JSON: nodes with named operators and edges to walk and rewire."""

from __future__ import annotations

import json
from difflib import get_close_matches
from math import prod
from numbers import Integral
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from . import _mxnet

__all__ = ["VARIABLE", "Entry", "Graph", "Node", "as_shape", "check_shapes", "output_shapes"]

VARIABLE = "null"


class Node:
    """One operator or variable (``op == "null"``) of a graph.

    Attributes
    ----------
    op, name : str
    attrs : dict of str to str
        Operator parameters and ``__hidden__`` attributes, as MXNet writes them.
    inputs : list of Entry
    control_deps : list of Node
    subgraphs : list
        JSON of the bodies of control-flow operators; ``subgraphs`` reads it.
    """

    __slots__ = ("attrs", "control_deps", "inputs", "name", "op", "subgraphs")

    def __init__(
        self,
        op: str,
        name: str,
        attrs: dict[str, str] | None = None,
        inputs: list[Entry] | None = None,
        control_deps: list[Node] | None = None,
        subgraphs: list | None = None,
    ) -> None:
        self.op = op
        self.name = name
        self.attrs = attrs if attrs is not None else {}
        self.inputs = inputs if inputs is not None else []
        self.control_deps = control_deps if control_deps is not None else []
        self.subgraphs = subgraphs

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    def __repr__(self) -> str:
        return f"Node({self.op}, {self.name!r})"


class Entry(NamedTuple):
    """Output ``index`` of ``node``; ``version`` is MXNet's count of mutations, 0 nearly always."""

    node: Node
    index: int = 0  # type: ignore[assignment]
    version: int = 0


class Graph:
    """Heads and all that they reach. ``attrs`` are the graph-level attributes of the JSON."""

    def __init__(self, heads: list[Entry], attrs: dict[str, Any] | None = None, *, numpy: bool = False) -> None:
        self.heads = heads
        self.attrs = attrs or {}
        self.numpy = numpy

    @classmethod
    def from_symbol(cls, symbol: mx.sym.Symbol) -> Graph:
        """Read a Symbol; ``symbol`` is not touched."""
        text = symbol.tojson(remove_amp_cast=False)
        return cls.from_json(text, numpy=_mxnet.is_numpy(symbol))

    @classmethod
    def from_json(cls, text: str, *, numpy: bool = False) -> Graph:
        """Read Symbol JSON as MXNet 1.9 writes it (older files: pass them through ``mx.sym.load``)."""
        raw = json.loads(text)
        nodes: list[Node] = []
        for item in raw["nodes"]:
            node = Node(item["op"], item["name"], dict(item.get("attrs") or {}), subgraphs=item.get("subgraphs"))
            node.inputs = [Entry(nodes[i], index, *rest) for i, index, *rest in item["inputs"]]
            node.control_deps = [nodes[i] for i in item.get("control_deps", ())]
            nodes.append(node)
        heads = [Entry(nodes[i], index, *rest) for i, index, *rest in raw["heads"]]
        return cls(heads, raw.get("attrs"), numpy=numpy)

    def nodes(self) -> Iterator[Node]:
        """Every node once, inputs before users, in MXNet's own order (depth first from the heads).

        MXNet derives ``list_arguments()`` from this order, so a rewrite that only puts single-input
        nodes on edges keeps the order of arguments.
        """
        seen: set[Node] = set()
        stack: list[Node | tuple[Node]] = [head.node for head in reversed(self.heads)]
        while stack:
            item = stack.pop()
            if isinstance(item, tuple):  # all that it reads is behind us
                yield item[0]
            elif item not in seen:
                seen.add(item)
                if not item.inputs and not item.control_deps:
                    yield item
                    continue
                stack.append((item,))
                stack += reversed(item.control_deps)
                stack += [entry.node for entry in reversed(item.inputs)]

    def names(self) -> dict[Node, str]:
        """A name for every node that no other has, in graph order.

        Layers that are called twice, and users, give nodes the same name: the second is ``name:1``, the
        third ``name:2``, skipping names that a node has by itself.
        """
        nodes = list(self.nodes())
        taken = {node.name for node in nodes}
        met: dict[str, int] = {}
        names: dict[Node, str] = {}
        for node in nodes:
            name = node.name
            count = met.get(name, 0)
            while count and name in taken:
                name = f"{node.name}:{count}"
                count += 1
            met[node.name] = max(count, 1)
            taken.add(name)
            names[node] = name
        return names

    def to_json(self) -> str:
        """Symbol JSON that ``mx.sym.load_json`` reads."""
        number: dict[Node, int] = {}
        items: list[dict[str, Any]] = []
        for node in self.nodes():
            item: dict[str, Any] = {"op": node.op, "name": node.name}
            if node.attrs:
                item["attrs"] = node.attrs
            item["inputs"] = [[number[e.node], e.index, e.version] for e in node.inputs]
            if node.control_deps:
                item["control_deps"] = [number[n] for n in node.control_deps]
            if node.subgraphs:
                item["subgraphs"] = node.subgraphs
            number[node] = len(items)
            items.append(item)
        return json.dumps(
            {
                "nodes": items,
                "arg_nodes": [i for node, i in number.items() if node.is_variable],
                "heads": [[number[e.node], e.index, e.version] for e in self.heads],
                "attrs": self.attrs,
            }
        )

    def to_symbol(self) -> mx.sym.Symbol:
        """A new Symbol, of the NumPy kind where this graph was read from one."""
        symbol = mx.sym.load_json(self.to_json())
        return symbol.as_np_ndarray() if self.numpy else symbol

    def consumers(self) -> dict[Entry, list[tuple[Node, int]]]:
        """Return, for every entry that is read, the nodes that read it, with the position of the input."""
        users: dict[Entry, list[tuple[Node, int]]] = {}
        for node in self.nodes():
            for position, entry in enumerate(node.inputs):
                users.setdefault(entry, []).append((node, position))
        return users

    def insert_behind(self, nodes: Collection[Node], made: Callable[[Node], Entry]) -> dict[Node, Entry]:
        """Have what reads the first output of each of ``nodes`` read ``made(node)`` instead; heads stay."""
        readers = self.consumers() if nodes else {}
        entries = {}
        for node in nodes:
            entries[node] = made(node)
            for user, position in readers.get(Entry(node), []):
                user.inputs[position] = entries[node]
        return entries


def as_shape(value: Any, name: str = "") -> tuple[int, ...]:
    """Return the shape that a user wrote as a tuple or list of positive integers; ``name``: of the input.

    Raises
    ------
    ValueError
        It is none; says what was probably meant.
    """
    start = f"{name}=" if name else ""
    if isinstance(value, (tuple, list)):
        sizes = tuple(int(size) for size in value if isinstance(size, Integral) and not isinstance(size, bool))
        if sizes and len(sizes) == len(value) and min(sizes) > 0:
            return sizes
        hint = "every size, that of the batch too, must be a positive integer"
    elif isinstance(value, np.ndarray):
        raise ValueError(f"{start}a NumPy array: give mx.nd.array(x), or its shape {value.shape}")
    else:
        hint = "a shape is a tuple, such as (32, 3, 224, 224)"
    raise ValueError(f"{start}{value!r} is neither an MXNet array nor a shape: {hint}")


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` for a shape of no input, perhaps a misspelt keyword, or one that MXNet cannot hold.

    MXNet counts the elements of an array in 64 bits and, unless it is built with ``USE_INT64_TENSOR_SIZE``, a size in
    32.
    """
    largest = 2**63 - 1 if mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE") else 2**31 - 1
    for name, shape in shapes.items():
        if name not in inputs:
            close = get_close_matches(name, [*inputs, *keywords], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(inputs[:5])}, ..."
            raise ValueError(f"the Symbol has no input {name!r}; {hint}")
        as_shape(shape, name)
        if any(size > largest for size in shape) or prod(shape) > 2**63 - 1:
            raise ValueError(
                f"{name}={shape} is too large for MXNet: a size is at most {largest:,}, all at most 2**63 - 1"
            )


def output_shapes(symbol: mx.sym.Symbol, shapes: Mapping[str, tuple]) -> list[tuple]:
    """Shapes of a Symbol's outputs, as far as they follow from those of its inputs; () or with 0 where they do not."""
    inputs = set(symbol.list_inputs())
    return symbol.infer_shape_partial(**{k: v for k, v in shapes.items() if k in inputs})[1]
