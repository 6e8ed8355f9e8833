"""A graph whose nodes can be read and rewired, made from MXNet's Symbol JSON and written back to it."""

from __future__ import annotations

import json
from typing import Any, Callable, ClassVar, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import mxnet as mx

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
    """One operator, or variable (``op == "null"``), of a graph; it equals only itself."""

    __slots__ = ("_control_deps", "_inputs", "attrs", "name", "op", "subgraphs")

    # How often any node was rewired so far: a Graph sorts its nodes anew if there was one since. A node may be in
    # several graphs, and none of them is told.
    rewirings: ClassVar[int] = 0

    def __init__(
        self,
        op: str,
        name: str,  # several nodes may have the same one
        attrs: dict[str, str] | None = None,  # parameters and attributes such as ``__dtype__``, as MXNet writes them
        inputs: Iterable[Entry] = (),  # auxiliary states too, in MXNet's order
        control_deps: Iterable[Node] = (),  # must run before this node, which reads nothing from them
        subgraphs: list | None = None,  # the bodies of control flow, as parsed JSON (``subgraphs.bodies``)
    ) -> None:
        self.op = op
        self.name = name
        self.attrs = attrs if attrs is not None else {}
        self._inputs = tuple(inputs)
        self._control_deps = tuple(control_deps)
        self.subgraphs = subgraphs

    @property
    def inputs(self) -> tuple[Entry, ...]:
        return self._inputs

    @inputs.setter
    def inputs(self, entries: Iterable[Entry]) -> None:
        self._inputs = tuple(entries)
        Node.rewirings += 1

    def rewire(self, position: int, entry: Entry) -> None:
        entries = [*self._inputs]
        entries[position] = entry
        self.inputs = entries

    @property
    def control_deps(self) -> tuple[Node, ...]:
        return self._control_deps

    @control_deps.setter
    def control_deps(self, nodes: Iterable[Node]) -> None:
        self._control_deps = tuple(nodes)
        Node.rewirings += 1

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    def __repr__(self) -> str:
        return f"Node({self.op}, {self.name!r})"


class Entry(NamedTuple):
    """One tensor of a graph: the output ``index`` of ``node``."""

    node: Node
    index: int = 0  # type: ignore[assignment]
    # How many operators have updated a variable in place so far, by MXNet's count. One that updates what it reads
    # counts too: 1 where the first BatchNorm reads its running mean.
    version: int = 0


# Who reads a tensor: a node, and the position of the tensor among its inputs.
Reader = Tuple[Node, int]


class Graph:
    """A Symbol as Python objects that can be rewritten: its outputs, ``heads``, and all nodes that they depend on.
    ``attrs`` are those of the whole graph; with ``numpy``, ``to_symbol`` returns a Symbol of ``mx.sym.np``."""

    def __init__(self, heads: list[Entry], attrs: dict[str, Any] | None = None, *, numpy: bool = False) -> None:
        self.heads = heads
        self.attrs = attrs or {}
        self.numpy = numpy
        self._sorted: tuple = ()  # the heads, and ``Node.rewirings``, for which the rest is known
        self.nodes()

    @classmethod
    def from_symbol(cls, symbol: mx.sym.Symbol) -> Graph:
        graph = cls.from_json(symbol.tojson(remove_amp_cast=False))
        graph.numpy = _mxnet.is_numpy(symbol)
        return graph

    @classmethod
    def from_json(cls, text: str, *, numpy: bool = False) -> Graph:
        """Return the graph of JSON of MXNet 1.9. Older JSON would lose attributes: use ``mx.sym.load_json`` first."""
        raw = json.loads(text)
        nodes: list[Node] = []
        for item in raw["nodes"]:
            inputs = [Entry(nodes[i], index, *rest) for i, index, *rest in item["inputs"]]
            before = [nodes[i] for i in item.get("control_deps", ())]
            attrs = dict(item.get("attrs") or {})
            nodes.append(Node(item["op"], item["name"], attrs, inputs, before, item.get("subgraphs")))
        heads = [Entry(nodes[i], index, *rest) for i, index, *rest in raw["heads"]]
        return cls(heads, raw.get("attrs"), numpy=numpy)

    def nodes(self) -> tuple[Node, ...]:
        """Return each node once, behind what it depends on, in MXNet's order, which ``list_arguments()`` has too."""
        now = (*self.heads, Node.rewirings)
        if self._sorted != now:
            self._sorted, self._nodes = now, tuple(self._in_order())
            self._consumers: dict[Entry, list[Reader]] = {}
            self._readers: dict[Node, list[Reader]] = {}
        return self._nodes

    def _in_order(self) -> Iterator[Node]:
        # Depth first from the outputs: a node with one input, such as a cast, does not change the order of the others.
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
        """Return a unique name for each node, in the order of ``nodes()``: of two ``"fc"`` the second is ``"fc:1"``."""
        nodes = self.nodes()
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
        symbol = mx.sym.load_json(self.to_json())
        return symbol.as_np_ndarray() if self.numpy else symbol

    def consumers(self) -> Mapping[Entry, Sequence[Reader]]:
        """Return who reads each tensor; a tensor that no node reads is missing. The result stays if nodes change."""
        nodes = self.nodes()
        if not self._consumers:
            for node in nodes:
                for position, entry in enumerate(node.inputs):
                    self._consumers.setdefault(entry, []).append((node, position))
        return self._consumers

    def readers(self) -> Mapping[Node, Sequence[Reader]]:
        """Return who reads an output of each node, as ``consumers`` does for each output by itself."""
        consumers = self.consumers()
        if not self._readers:
            for entry, users in consumers.items():
                self._readers.setdefault(entry.node, []).extend(users)
        return self._readers

    def shapes_of(self, entries: Sequence[Entry], shapes: Mapping[str, tuple]) -> list[tuple]:
        """Return the shapes of tensors of this graph, as ``output_shapes`` does."""
        return output_shapes(Graph([*entries], self.attrs, numpy=self.numpy).to_symbol(), shapes)

    def insert_behind(self, nodes: Collection[Node], made: Callable[[Node], Entry]) -> dict[Node, Entry]:
        """Let all that read the first output of one of ``nodes`` read ``made(node)`` instead; return what was made.
        ``made`` makes nodes that read this output. Outputs of the graph stay: see ``casts.replace_heads``."""
        readers = self.consumers() if nodes else {}
        entries = {}
        for node in nodes:
            entries[node] = made(node)
            for user, position in readers.get(Entry(node), []):
                user.rewire(position, entries[node])
        return entries


def data_inputs(graph: Graph) -> list[str]:
    """Return the variables that are the first input of an operator: data, rarely a weight or a label."""
    first = (node.inputs[0].node for node in graph.nodes() if node.inputs)
    return list(dict.fromkeys(node.name for node in first if node.is_variable))


def inferred(symbol: mx.sym.Symbol, infer: Callable[..., tuple], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``symbol.infer_shape_partial`` or ``infer_type_partial`` finds for each argument and state, by name.
    Raises ``MXNetError`` if what is ``given`` of some contradicts the Symbol."""
    arguments, _, states = infer(**given)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    return dict(zip(names, [*(arguments or ()), *(states or ())]))


def output_shapes(symbol: mx.sym.Symbol, shapes: Mapping[str, tuple]) -> list[tuple]:
    """Return the outputs' shapes, as far as they follow from those of inputs: 0 for an unknown size, ``()`` for all.
    Raises ``MXNetError`` if ``shapes`` contradict the Symbol."""
    inputs = set(symbol.list_inputs())
    return symbol.infer_shape_partial(**{k: v for k, v in shapes.items() if k in inputs})[1]
