"""Every operator of a graph, with shapes and dtypes of its tensors and how often it runs."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from math import prod
from typing import Any, Iterator, Mapping, NamedTuple

import mxnet as mx
import numpy as np

from ...precision.graph import Graph, Node
from ...precision.subgraphs import Body, bodies
from .gemm import Products, is_matrix, products

__all__ = ["ShapedNode", "Tensor", "dtype_name", "numpy_dtype", "shaped_nodes"]


class Tensor(NamedTuple):
    """The shape of a tensor, and its dtype as ``dtype_name`` returns it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)


class ShapedNode(NamedTuple):
    """One operator of a graph.

    Attributes
    ----------
    name : str
        As in a Plan: unique, ``loop/name`` in the body of a loop.
    node : Node
    ins, outs : list of Tensor or None
        None where the shape is not known.
    times : float
        How often it runs: the rounds of its loops.
    """

    name: str
    node: Node
    ins: list[Tensor | None]
    outs: list[Tensor | None]
    times: float

    def products(self) -> Products | None:
        """Return what it multiplies; None where it is no matrix operator, or where its shapes are not known."""
        if not is_matrix(self.node.op) or self.outs[0] is None or None in self.ins:
            return None
        shapes = [tensor.shape for tensor in self.ins if tensor]
        return products(self.node.op, self.node.attrs, shapes, self.outs[0].shape)


def shaped_nodes(graph: Graph, known: Mapping[str, Tensor], prefix: str = "", times: float = 1) -> Iterator[ShapedNode]:
    """Yield every operator, those in the bodies of a loop after it; ``known`` has the graph's inputs by name."""
    found = _infer(graph, known)
    for node, name in graph.names().items():
        if node.is_variable:
            continue
        ins = [found[entry.node][entry.index] for entry in node.inputs]
        yield ShapedNode(prefix + name, node, ins, found[node], times)
        for number, body in enumerate(bodies(node)):
            rounds = _rounds(node, number, ins)
            yield from shaped_nodes(body.graph, _inner(node, body, ins), prefix + body.prefix(name), times * rounds)


def _infer(graph: Graph, known: Mapping[str, Tensor]) -> dict[Node, list[Tensor | None]]:
    """Return the outputs of every node, None where shape or dtype do not follow from ``known``."""
    nodes = list(graph.nodes())
    raw = json.loads(graph.to_json())
    inputs = {node.name: node.attrs for node in nodes if node.is_variable}
    for number, item in enumerate(raw["nodes"]):
        if item["op"] != "null":
            item["name"] = f"node{number}"
    raw["heads"] = [[i, 0, 0] for i, item in enumerate(raw["nodes"]) if item["op"] != "null"] or raw["heads"]
    symbol = mx.sym.load_json(json.dumps(raw)).get_internals()
    if graph.numpy:
        symbol = symbol.as_np_ndarray()
    shapes = {name: tensor.shape for name, tensor in known.items() if name in inputs}
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


_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def dtype_name(dtype: Any) -> str:
    """Return ``"bfloat16"`` for MXNet's bfloat16, NumPy's name for any other dtype."""
    dtype = np.dtype(dtype)
    return "bfloat16" if dtype == _BFLOAT16 else dtype.name


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype that ``dtype_name`` calls ``name``."""
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def _rounds(node: Node, number: int, ins: list[Tensor | None]) -> float:
    """Return how often a body runs; each branch of ``cond`` counts as half."""
    if node.op == "_foreach":
        return ins[0].shape[0] if ins and ins[0] else 1
    if node.op == "_while_loop":
        return float(node.attrs["max_iterations"])
    return 0.5 if number else 1


def _inner(node: Node, body: Body, ins: list[Tensor | None]) -> dict[str, Tensor]:
    """Return what is known of a body's variables; of an array that a loop iterates over, one element."""
    sliced = literal_eval(node.attrs["in_data_locs"]) if node.op == "_foreach" else ()
    tensors = dict(zip(node.inputs, ins))
    known = {}
    for place, (variable, entry) in enumerate(body.outer.items()):
        tensor = tensors[entry]
        if tensor:
            known[variable.name] = Tensor(tensor.shape[1:], tensor.dtype) if place in sliced else tensor
    return known
