"""Scales the gradient of loss heads that ignore the gradient of their output (SoftmaxOutput, MakeLoss, ...).

Such a head writes its own gradient, with a ``grad_scale`` that is fixed when the graph is bound. A scaled loss does not
reach it, so an identity in front of the head multiplies the gradient that the head writes by ``s``::

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
from .rules import RULES, Kind, rule_of
from .subgraphs import bodies, feed_bodies

SCALE_NAME = "mxmp_loss_scale"

# Operators that are heads with some attributes, or always.
HEAD_OPERATORS = {"Custom"}
HEAD_OPERATORS |= {op for op, rule in RULES.items() if Kind.HEAD in (rule.kind, *(w.kind for w in rule.when))}


def scale_heads(graph: Graph, dtypes: Mapping[str, Any]) -> bool:
    """Insert nodes in ``graph``, in place, that multiply the gradients that its loss heads write by the loss scale.

    A loss head ignores the gradient of its output, so scaling the loss does not scale what it writes. The inserted
    nodes pass the head's input on unchanged in the forward. The loss scale becomes a new input of the graph: an FP32
    variable of shape (1,), called ``SCALE_NAME``. Bodies of control flow that have loss heads are changed in the same
    way, and read the same loss scale. A second call would multiply twice. Returns whether the graph or a body has a
    loss head; if not, nothing changes.

    ``dtypes`` maps names of the graph's inputs to NumPy dtypes; an input that is not in it has the dtype that MXNet
    infers, or FP32 if it infers none. Where a head reads another dtype than FP32, such as int32 labels of a Custom
    operator, the gradient is multiplied in FP32 and cast back.
    """
    scale = Entry(Node("null", SCALE_NAME, {"__shape__": "(1,)", "__dtype__": TYPE_CODES["float32"]}))
    read = [(node, position) for node in graph.nodes() for position in _own_gradients(node)]
    inner = [(node, [body.graph for body in bodies(node)]) for node in graph.nodes() if node.subgraphs]
    for (head, position), dtype in zip(read, _dtypes(graph, [node.inputs[i] for node, i in read], dtypes)):
        head.inputs[position] = _scaled(head.inputs[position], dtype, scale, f"{head.name}_in{position}")
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
    """Return whether ``graph``, or a body of control flow in it, has an operator that writes its own gradient."""
    inner = (body.graph for node in graph.nodes() if node.subgraphs for body in bodies(node))
    return any(map(_own_gradients, graph.nodes())) or any(map(has_loss_head, inner))


def _dtypes(graph: Graph, tensors: list[Entry], known: Mapping[str, Any]) -> list[str]:
    """Return the names of the dtypes that MXNet infers for ``tensors`` of ``graph``; ``"float32"`` if it infers none.

    ``known`` maps names of inputs of the graph to their dtypes. If the inference raises, all are ``"float32"``.
    """
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
    """Return whether ``node`` is a loss head to whose gradients ``scale_heads`` has not applied the loss scale."""
    return not all(_is_scaled(node.inputs[position]) for position in _own_gradients(node))


def _is_scaled(x: Entry) -> bool:
    """Return whether ``x`` is a tensor that ``_scaled`` returned, so that its gradient is multiplied by the loss scale.

    Compares the types of the operators that compute ``x``: in a graph that autograd recorded they have other names.
    """
    steps = ("elemwise_add", "broadcast_mul", "elemwise_sub", "_contrib_sign_ste")
    for op, position in zip(steps, (1, 1, 0, 0)):
        while x.node.op == "Cast":
            x = x.node.inputs[0]
        if x.node.op != op:
            return False
        x = x.node.inputs[position]
    return True


def _own_gradients(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs whose gradients ``node`` writes without regard to its output's gradient.

    That is ``(0,)`` for a loss head such as SoftmaxOutput, the positions of all arguments (not of auxiliary states) for
    a Custom operator whose backward does not read the gradients of its outputs, and ``()`` for every other node.
    """
    if node.is_variable:
        return ()
    if node.op == "Custom":
        attrs = {k: v for k, v in node.attrs.items() if not k.startswith("__")}
        return tuple(range(_mxnet.count_own_gradients(attrs, len(node.inputs))))
    rule = rule_of(node.op) if node.op in RULES else None
    return (0,) if rule is not None and rule.resolve(node.attrs)[0] is Kind.HEAD else ()


def zero_with_gradient(x: Entry, op: Callable[..., Entry]) -> Entry:
    """Return a tensor of zeros, also where ``x`` is inf or NaN, whose gradient goes to ``x`` unchanged.

    ``op(type, role, *inputs)`` makes an operator and returns its output.
    """
    step = op("_contrib_sign_ste", "step", x)  # its gradient is that of an identity
    return op("elemwise_sub", "zero", step, op("BlockGrad", "frozen", step))


def _scaled(x: Entry, dtype: str, scale: Entry, name: str) -> Entry:
    """Return a tensor that equals ``x`` in the forward; in the backward its gradient, times ``scale``, goes to ``x``.

    If ``dtype``, that of ``x``, is not FP32, the product is cast, and not ``scale``: a cast of ``scale`` would run in
    the forward, before the backward's loss scale is set. So would a copy to another device, with ``group2ctxs``:
    ``scale`` is the first input of the product, as MXNet computes an operator where its first input is. ``name`` is the
    prefix of the names of the new nodes.
    """

    def op(kind: str, role: str, *inputs: Entry, **attrs: str) -> Entry:
        return Entry(Node(kind, f"{name}_scale_{role}", attrs, list(inputs)))

    def cast(tensor: Entry, role: str, to: str) -> Entry:
        return tensor if dtype == "float32" else op("Cast", role, tensor, dtype=to)

    zero = cast(zero_with_gradient(x, op), "full", "float32")
    gradient = cast(op("broadcast_mul", "gradient", scale, zero), "cast", dtype)
    return op("elemwise_add", "sum", op("BlockGrad", "value", x), gradient)
