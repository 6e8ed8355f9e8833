"""Loss scaling for heads that ignore the gradient from above (SoftmaxOutput, MakeLoss, ...).

Such a head writes its own gradient, with a ``grad_scale`` that is fixed when the graph is bound. A
scaled loss never reaches it, so the scale goes behind it instead: an identity in front of the head
that multiplies the gradient by ``s``::

    t = sign_ste(x);  y = BlockGrad(x) + (t - BlockGrad(t)) * s

Forward, ``y`` is ``x``, infinities and NaN included; backward, dx is dy * s exactly. ``s`` is an input
of the graph, so a new scale rebinds nothing.
"""

from __future__ import annotations

from . import _mxnet
from .graph import Entry, Graph, Node
from .rules import RULES, Kind, rule_of

__all__ = ["HEAD_OPERATORS", "SCALE_NAME", "is_unscaled", "scale_heads"]

SCALE_NAME = "mxmp_loss_scale"

# Operators that are heads with some attributes, or always.
HEAD_OPERATORS = {"Custom"}
HEAD_OPERATORS |= {op for op, rule in RULES.items() if Kind.HEAD in (rule.kind, *(w.kind for w in rule.when))}


def scale_heads(graph: Graph) -> bool:
    """Put the scaling identity in front of every loss head of ``graph``, in place.

    The scale is a variable ``SCALE_NAME``, FP32 of shape (1,). Return whether there was a head.
    """
    heads = [(node, positions) for node in graph.nodes() if (positions := _own_gradients(node))]
    if not heads:
        return False
    scale = Entry(Node("null", SCALE_NAME, {"__shape__": "(1,)", "__dtype__": "0"}))
    for head, positions in heads:
        for position in positions:
            head.inputs[position] = _scaled(head.inputs[position], scale, f"{head.name}_in{position}")
    return True


def is_unscaled(node: Node) -> bool:
    """Return whether a node is a loss head without the scaling identity in front of it."""
    return not all(_is_scaled(node.inputs[position]) for position in _own_gradients(node))


def _is_scaled(x: Entry) -> bool:
    """Return whether ``x`` is what ``_scaled`` makes; by its operators, since a recorded graph has other names."""
    steps = ("elemwise_add", "broadcast_mul", "elemwise_sub", "_contrib_sign_ste")
    for op, position in zip(steps, (1, 0, 0, 0)):
        if x.node.op != op:
            return False
        x = x.node.inputs[position]
    return True


def _own_gradients(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs whose gradient ignores the one from above."""
    if node.is_variable:
        return ()
    if node.op == "Custom":
        attrs = {k: v for k, v in node.attrs.items() if not k.startswith("__")}
        return () if _mxnet.custom_op_reads_gradient(attrs, len(node.inputs)) else tuple(range(len(node.inputs)))
    rule = rule_of(node.op) if node.op in RULES else None
    return (0,) if rule is not None and rule.resolve(node.attrs)[0] is Kind.HEAD else ()


def _scaled(x: Entry, scale: Entry, name: str) -> Entry:
    def op(kind: str, role: str, *inputs: Entry) -> Entry:
        return Entry(Node(kind, f"{name}_scale_{role}", {}, list(inputs)))

    step = op("_contrib_sign_ste", "step", x)
    zero = op("elemwise_sub", "zero", step, op("BlockGrad", "frozen", step))
    return op("elemwise_add", "sum", op("BlockGrad", "value", x), op("broadcast_mul", "gradient", zero, scale))
