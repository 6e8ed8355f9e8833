"""Scales the gradient of loss heads that ignore the gradient of their output (SoftmaxOutput, MakeLoss, ...).

A scaled loss does not reach such a head. An identity in front of it multiplies the gradient that it writes by ``s``::

    t = sign_ste(x);  y = BlockGrad(x) + s * (t - BlockGrad(t))

In the forward ``y`` equals ``x``, also where ``x`` is infinity or NaN; in the backward dx is dy * s exactly. ``s`` is
an input of the graph, so a new loss scale needs no new bind.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import mxnet as mx
import numpy as np

from . import _mxnet
from .graph import TYPE_CODES, Entry, Graph, Node
from .rule import Kind
from .rules import RULES
from .subgraphs import bodies, feed_bodies

SCALE_NAME = "mxmp_loss_scale"

# Operators that are heads with some attributes, or always.
HEAD_OPERATORS = {"Custom"}
HEAD_OPERATORS |= {op for op, rule in RULES.items() if Kind.HEAD in (rule.kind, *(w.kind for w in rule.when))}


def scale_heads(graph: Graph, dtypes: Mapping[str, Any]) -> bool:
    """Multiply, in place, the gradients that loss heads write by a new input, ``SCALE_NAME``; return whether any does.
    It is FP32, of shape (1,); bodies read it too. ``dtypes`` are those of inputs. A second call multiplies twice."""
    scale = Entry(Node("null", SCALE_NAME, {"__shape__": "(1,)", "__dtype__": TYPE_CODES["float32"]}))
    read = [(node, position) for node in graph.nodes() for position in _own_gradients(node)]
    inner = [(node, [body.graph for body in bodies(node)]) for node in graph.nodes() if node.subgraphs]
    for (head, position), dtype in zip(read, _dtypes(graph, [node.inputs[i] for node, i in read], dtypes)):
        head.rewire(position, _scaled(head.inputs[position], dtype, scale, f"{head.name}_in{position}"))
    found = bool(read)
    for node, graphs in inner:
        for each in graphs:
            each.attrs = graph.attrs  # says of which MXNet the graph is; a body does not
        have_heads = [scale_heads(each, {}) for each in graphs]
        if any(have_heads):
            feed_bodies(node, graphs, SCALE_NAME, scale)
            found = True
    return found


def has_loss_head(graph: Graph) -> bool:
    """Return whether an operator of ``graph``, or of a body in it, writes its own gradient."""
    inner = (body.graph for node in graph.nodes() if node.subgraphs for body in bodies(node))
    return any(map(_own_gradients, graph.nodes())) or any(map(has_loss_head, inner))


def _dtypes(graph: Graph, tensors: list[Entry], known: Mapping[str, Any]) -> list[str]:
    """Return the dtypes that MXNet infers for ``tensors`` from those of inputs; ``"float32"`` where it infers none."""
    if not tensors:
        return []
    symbol = Graph([*tensors, *graph.heads], graph.attrs, numpy=graph.numpy).to_symbol()
    names = set(symbol.list_inputs())
    try:
        found = symbol.infer_type_partial(**{name: known[name] for name in known.keys() & names})[1]
    except mx.MXNetError:  # an operator asks for a dtype that is not known here; or binding will raise this error again
        return ["float32"] * len(tensors)
    return [np.dtype(dtype or "float32").name for dtype in found[: len(tensors)]]


def is_unscaled(node: Node) -> bool:
    """Return whether ``node`` is a loss head to which ``scale_heads`` was not applied."""
    return not all(_is_scaled(node.inputs[position]) for position in _own_gradients(node))


def _is_scaled(x: Entry) -> bool:
    """Return whether ``_scaled`` made ``x``."""
    # In a graph that autograd recorded, the operators have other names: their types are compared.
    steps = ("elemwise_add", "broadcast_mul", "elemwise_sub", "_contrib_sign_ste")
    for op, position in zip(steps, (1, 1, 0, 0)):
        while x.node.op == "Cast":
            x = x.node.inputs[0]
        if x.node.op != op:
            return False
        x = x.node.inputs[position]
    return True


def _own_gradients(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs whose gradients ``node`` writes without regard to its output's gradient."""
    if node.is_variable:
        return ()
    if node.op == "Custom":
        attrs = {k: v for k, v in node.attrs.items() if not k.startswith("__")}
        return tuple(range(_mxnet.count_own_gradients(attrs, len(node.inputs))))
    rule = RULES.get(node.op)
    return (0,) if rule is not None and rule.resolve(node.attrs)[0] is Kind.HEAD else ()


def zero_with_gradient(x: Entry, op: Callable[..., Entry]) -> Entry:
    """Return zeros, also for inf and NaN, whose gradient goes to ``x``. ``op(type, role, *inputs)`` makes a node."""
    step = op("_contrib_sign_ste", "step", x)  # its gradient is that of an identity
    return op("elemwise_sub", "zero", step, op("BlockGrad", "frozen", step))


def _scaled(x: Entry, dtype: str, scale: Entry, name: str) -> Entry:
    """Return a tensor that equals ``x``; its gradient goes to ``x`` in the dtype of ``x``, multiplied by ``scale``."""

    def op(kind: str, role: str, *inputs: Entry, **attrs: str) -> Entry:
        return Entry(Node(kind, f"{name}_scale_{role}", attrs, list(inputs)))

    def cast(tensor: Entry, role: str, to: str) -> Entry:
        return tensor if dtype == "float32" else op("Cast", role, tensor, dtype=to)

    zero = cast(zero_with_gradient(x, op), "full", "float32")
    # ``x`` may be int32 labels of a Custom operator. The product is cast, not ``scale``: that cast would run in the
    # forward, before the backward's loss scale is set. So would a copy to another device (group2ctxs), unless ``scale``
    # is the first input: MXNet computes an operator where that is.
    gradient = cast(op("broadcast_mul", "gradient", scale, zero), "cast", dtype)
    return op("elemwise_add", "sum", op("BlockGrad", "value", x), gradient)
