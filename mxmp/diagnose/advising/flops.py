"""Every operator of a graph, with the shapes and dtypes of its inputs and outputs, and how often it runs."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from math import prod
from typing import Any, Iterator, Mapping, NamedTuple

import mxnet as mx

from ...precision._mxnet import dtype_name, numpy_dtype
from ...precision.graph import Graph, Node
from ...precision.subgraphs import Body, bodies
from .gemm import PRODUCTS, Products


class Tensor(NamedTuple):
    """The shape of a tensor, and the name of its dtype: ``"float32"``, ``"bfloat16"`` and so on."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)


class ShapedNode(NamedTuple):
    """One operator of a graph, with the shapes and dtypes of its inputs and outputs; None for what is not known."""

    # As in a Plan: "loop/fc" in the body of the loop "loop".
    name: str
    node: Node
    ins: list[Tensor | None]
    outs: list[Tensor | None]
    # In one forward: the iterations of the loops around it (of while_loop the maximum), and 0.5 for a branch of cond.
    times: float

    def products(self) -> Products | None:
        """Return the matrix products of the operator; None if it is no matrix operator or a shape is not known."""
        if self.node.op not in PRODUCTS or self.outs[0] is None or None in self.ins:
            return None
        shapes = [tensor.shape for tensor in self.ins if tensor]
        return PRODUCTS[self.node.op](self.node.attrs, shapes, self.outs[0].shape)


def shaped_nodes(graph: Graph, known: Mapping[str, Tensor], prefix: str = "", times: float = 1) -> Iterator[ShapedNode]:
    """Yield every operator of a graph, and those of its bodies behind it; ``times`` is how often the graph runs."""
    found = _infer(graph, known)
    for node, name in graph.names().items():
        if node.is_variable:
            continue
        ins = [found[entry.node][entry.index] for entry in node.inputs]
        yield ShapedNode(prefix + name, node, ins, found[node], times)
        for number, body in enumerate(bodies(node)):
            rounds = _rounds(node, number, ins)
            body.graph.attrs = graph.attrs  # of which MXNet it is; else MXNet changes an argmax over axis -1
            yield from shaped_nodes(body.graph, _inner(node, body, ins), prefix + body.prefix(name), times * rounds)


def _infer(graph: Graph, known: Mapping[str, Tensor]) -> dict[Node, list[Tensor | None]]:
    """Return the shape and dtype of each output of each node, None for unknown ones; ``known`` may lack variables."""
    nodes = list(graph.nodes())
    raw = json.loads(graph.to_json())
    inputs = {node.name: node.attrs for node in nodes if node.is_variable}
    for number, item in enumerate(raw["nodes"]):
        if item["op"] != "null":
            item["name"] = f"node{number}"
    # The graph's own outputs stay: one may be an input that no operator reads.
    raw["heads"] += [[i, 0, 0] for i, item in enumerate(raw["nodes"]) if item["op"] != "null"]
    symbol = mx.sym.load_json(json.dumps(raw, ensure_ascii=False)).get_internals()
    if graph.numpy:
        symbol = symbol.as_np_ndarray()
    shapes = {name: tensor.shape for name, tensor in known.items() if name in inputs}
    # Instead of their dtype in known.
    typed = {name for name, attrs in inputs.items() if "__dtype__" in attrs}
    dtypes = {name: numpy_dtype(known[name].dtype) for name in known.keys() & (inputs.keys() - typed)}
    try:
        _, found_shapes, _ = symbol.infer_shape_partial(**shapes)
        _, found_dtypes, _ = symbol.infer_type_partial(**dtypes)
    except mx.MXNetError as error:
        raise mx.MXNetError(re.sub(r"\bnode(\d+)\b", lambda n: nodes[int(n[1])].name, str(error))) from error
    result: dict[Any, list[Tensor | None]] = {name: [] for name in (*inputs, *range(len(nodes)))}
    for name, shape, dtype in zip(symbol.list_outputs(), found_shapes, found_dtypes):
        key = name if name in inputs else int(name.split("_")[0][len("node") :])
        scalar = graph.numpy and shape == ()  # elsewhere () is a shape that is not known
        is_known = (scalar or (bool(shape) and all(size > 0 for size in shape))) and dtype is not None
        result[key].append(Tensor(tuple(shape), dtype_name(dtype)) if is_known else None)
    return {node: result[node.name if node.is_variable else number] for number, node in enumerate(nodes)}


def _rounds(node: Node, number: int, ins: list[Tensor | None]) -> float:
    """Return how often a body runs when its node runs once; ``number`` counts the node's bodies from 0."""
    if node.op == "_foreach":
        return ins[0].shape[0] if ins and ins[0] else 1
    if node.op == "_while_loop":
        return float(node.attrs["max_iterations"])
    # Of cond: first the condition, then the branches, of which one runs.
    return 0.5 if number else 1


def _inner(node: Node, body: Body, ins: list[Tensor | None]) -> dict[str, Tensor]:
    """Return the known shapes and dtypes of the variables in a control-flow node's body."""
    sliced = literal_eval(node.attrs["in_data_locs"]) if node.op == "_foreach" else ()
    known = {}
    for place, (variable, position) in enumerate(body.positions.items()):
        tensor = ins[position]
        if tensor:
            # A foreach iterates over the first axis.
            known[variable.name] = Tensor(tensor.shape[1:], tensor.dtype) if place in sliced else tensor
    return known
