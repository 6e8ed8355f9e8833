"""A graph whose nodes can be read and rewired, made from MXNet's Symbol JSON and written back to it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from math import prod
from numbers import Integral
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ..policy import Policy, is_policy_text
from . import _mxnet

VARIABLE = "null"
# From the name of a dtype to MXNet's code for it (mshadow/base.h). Symbol JSON writes the dtype of a variable, its
# attribute ``__dtype__``, as a code, and the dtype of an operator as a name.
TYPE_CODES = {
    "float32": "0",
    "float64": "1",
    "float16": "2",
    "uint8": "3",
    "int32": "4",
    "int8": "5",
    "int64": "6",
    "bool": "7",
    "bfloat16": "12",
}


class Node:
    """One operator or variable (``op == "null"``) of a graph. Two nodes are equal only if they are the same object.

    Attributes
    ----------
    op : str
        The operator's type, ``"Convolution"``; ``"null"`` for a variable.
    name : str
        The node's name, ``"conv0"``. Several nodes may have the same one.
    attrs : dict of str to str
        Operator parameters, such as ``{"kernel": "(3, 3)"}``, and attributes like ``__dtype__``, as MXNet writes them.
    inputs : list of Entry
        The tensors that the node reads, auxiliary states too, in MXNet's order.
    control_deps : list of Node
        Nodes that must run before this one, although it reads nothing from them.
    subgraphs : list or None
        For a control-flow operator (``_foreach``, ``_while_loop``, ``_cond``), the graphs that it runs, as parsed JSON;
        ``subgraphs.bodies`` returns them as ``Graph`` objects. None for any other node.
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
    """One tensor of a graph: the output ``index`` of ``node``.

    If ``node`` is a variable, ``version`` is how many operators have updated it in place so far, by MXNet's count. An
    operator that updates what it reads counts too, so ``version`` is 1 where the first BatchNorm reads its running
    mean. For other tensors it is 0.
    """

    node: Node
    index: int = 0  # type: ignore[assignment]
    version: int = 0


class Graph:
    """A Symbol as Python objects that can be rewritten: its outputs and all nodes that they depend on.

    Attributes
    ----------
    heads : list of Entry
        The graph's outputs, in order.
    attrs : dict
        The graph-level attributes of the Symbol JSON, such as ``{"mxnet_version": ["int", 10901]}``.
    numpy : bool
        Whether the graph was read from a Symbol of ``mx.sym.np``, so that ``to_symbol`` returns such a Symbol.
    """

    def __init__(self, heads: list[Entry], attrs: dict[str, Any] | None = None, *, numpy: bool = False) -> None:
        self.heads = heads
        self.attrs = attrs or {}
        self.numpy = numpy

    @classmethod
    def from_symbol(cls, symbol: mx.sym.Symbol) -> Graph:
        """Return the graph of a Symbol, with its ``amp_cast`` nodes, which ``Symbol.tojson`` leaves out by default.

        The Symbol is not changed.
        """
        text = symbol.tojson(remove_amp_cast=False)
        return cls.from_json(text, numpy=_mxnet.is_numpy(symbol))

    @classmethod
    def from_json(cls, text: str, *, numpy: bool = False) -> Graph:
        """Return the graph of ``text``, a Symbol's JSON as MXNet 1.9 writes it.

        JSON of an older MXNet would lose attributes here: pass it to ``mx.sym.load_json``, and the Symbol to
        ``from_symbol``. ``numpy`` says whether ``to_symbol`` shall return a Symbol of ``mx.sym.np``, which the JSON
        does not say.
        """
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
        """Yield each node once, in MXNet's own order: depth first from the outputs.

        A node comes after the nodes of its ``inputs`` and ``control_deps``. ``list_arguments()`` of a Symbol has the
        variables in this order. Inserting a node with one input, such as a cast, between two nodes does not change the
        order of the others.
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

    def copy(self) -> Graph:
        """Return an equal graph of new nodes."""
        return Graph.from_json(self.to_json(), numpy=self.numpy)

    def names(self) -> dict[Node, str]:
        """Return a dict from each node to a name that no other node has, in the order of ``nodes()``.

        Several nodes have the same name if a layer is called twice, or if a user gives one name to two nodes. The first
        keeps the name, the second gets ``"name:1"``, the third ``"name:2"``; a name that another node has is skipped.
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
        """Return the graph as Symbol JSON, which ``mx.sym.load_json`` reads."""
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
            },
            ensure_ascii=False,  # MXNet's reader does not know the escape \u
        )

    def to_symbol(self) -> mx.sym.Symbol:
        """Return the graph as a new Symbol, of ``mx.sym.np`` where ``numpy`` is True."""
        symbol = mx.sym.load_json(self.to_json())
        return symbol.as_np_ndarray() if self.numpy else symbol

    def consumers(self) -> dict[Entry, list[tuple[Node, int]]]:
        """Return a dict from each tensor to the places where nodes read it: pairs ``(node, position of the input)``.

        A tensor that no node reads, such as most graph outputs, is not in the dict.
        """
        users: dict[Entry, list[tuple[Node, int]]] = {}
        for node in self.nodes():
            for position, entry in enumerate(node.inputs):
                users.setdefault(entry, []).append((node, position))
        return users

    def insert_behind(self, nodes: Collection[Node], made: Callable[[Node], Entry]) -> dict[Node, Entry]:
        """Let all nodes that read the first output of one of ``nodes`` read ``made(node)`` instead; change this graph.

        ``made`` is called once for each of ``nodes``. It makes new nodes that compute a tensor from the node's first
        output, such as a relu, and returns this tensor. The new nodes still read the first output. Returns a dict from
        each of ``nodes`` to its ``made(node)``. Outputs of the graph stay as they are: to replace them too, pass the
        dict to ``casts.replace_heads``.
        """
        readers = self.consumers() if nodes else {}
        entries = {}
        for node in nodes:
            entries[node] = made(node)
            for user, position in readers.get(Entry(node), []):
                user.inputs[position] = entries[node]
        return entries


def as_shape(value: Any, name: str = "") -> tuple[int, ...]:
    """Return a shape that a user wrote, a non-empty tuple or list of positive integers, as a tuple of int.

    Raises ``ValueError`` for anything else. The message says how to write a shape, and begins with ``name``, the name
    of the input, unless ``name`` is empty.
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
        if isinstance(value, Policy) or (isinstance(value, str) and is_policy_text(value)):
            hint = f"a policy is given by name, policy={str(value)!r}"
    raise ValueError(f"{start}{value!r} is neither an MXNet array nor a shape: {hint}")


def data_inputs(graph: Graph) -> list[str]:
    """Return the names of the variables that are the first input of an operator: data, rarely a weight or a label."""
    first = (node.inputs[0].node for node in graph.nodes() if node.inputs)
    return list(dict.fromkeys(node.name for node in first if node.is_variable))


def wanted_shapes(names: Sequence[str]) -> str:
    """Return the end of a message about inputs of a Symbol whose shape is not known: their names, how to give it."""
    return (
        f"{', '.join(names[:5])}: give those of all inputs, such as {names[0]}=(32, 3, 224, 224), or "
        f"--shape {names[0]}=32,3,224,224 on the command line"
    )


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` if a name or a shape in ``shapes``, which a user wrote as keywords, is wrong for a Symbol.

    Each name must be one of ``inputs``, the names of the Symbol's inputs; not every input needs a shape. Each shape
    must be one that ``as_shape`` accepts, and small enough for MXNet. It must have fewer than 2**63 elements. Each size
    must be below 2**31, or below 2**63 if MXNet was built with ``USE_INT64_TENSOR_SIZE``. ``keywords`` are the calling
    function's other keyword arguments, such as ``"policy"``: the message suggests one if an unknown name resembles it.
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
    """Return the shapes of a Symbol's outputs, as far as MXNet infers them from ``shapes``, the inputs' shapes by name.

    A size that cannot be inferred is 0, and a shape of which nothing is known is ``()``. Names that are no inputs of
    the Symbol are ignored. Raises ``MXNetError`` if the shapes contradict the Symbol.
    """
    inputs = set(symbol.list_inputs())
    return symbol.infer_shape_partial(**{k: v for k, v in shapes.items() if k in inputs})[1]
