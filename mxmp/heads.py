"""Loss scaling for heads that ignore the gradient from above (SoftmaxOutput, MakeLoss, ...).

Such a head writes its own gradient, with a ``grad_scale`` that is fixed when the graph is bound. A
scaled loss never reaches it, so the scale goes behind it instead: an identity in front of the head
that multiplies the gradient by ``s``::

    t = sign_ste(x);  y = BlockGrad(x) + (t - BlockGrad(t)) * s

Forward, ``y`` is ``x``, infinities and NaN included; backward, dx is dy * s exactly. ``s`` is an input
of the graph, so a new scale rebinds nothing.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.ndarray import NDArray

from .graph import Entry, Graph, Node
from .rules import Kind, rule_of

__all__ = ["SCALE_NAME", "HeadScale", "scale_heads"]

SCALE_NAME = "mxmp_loss_scale"


def scale_heads(graph: Graph) -> bool:
    """Put the scaling identity in front of every loss head of ``graph``, in place.

    The scale is a variable ``SCALE_NAME``, FP32 of shape (1,). Returns whether there was a head.
    """
    heads = [n for n in graph.nodes() if not n.is_variable and rule_of(n.op).resolve(n.attrs)[0] is Kind.HEAD]
    if not heads:
        return False
    scale = Entry(Node("null", SCALE_NAME, {"__shape__": "(1,)", "__dtype__": "0"}))
    for head in heads:
        head.inputs[0] = _scaled(head.inputs[0], scale, head.name)
    return True


def _scaled(x: Entry, scale: Entry, name: str) -> Entry:
    def op(kind: str, *inputs: Entry) -> Entry:
        return Entry(Node(kind, f"{name}_scale_{kind.lstrip('_')}{len(made)}", {}, list(inputs)))

    made: list[Entry] = []
    step = op("_contrib_sign_ste", x)
    made.append(step)
    frozen = op("BlockGrad", step)
    made.append(frozen)
    zero = op("elemwise_sub", step, frozen)
    return op("elemwise_add", op("BlockGrad", x), op("broadcast_mul", zero, scale))


class HeadScale:
    """The value of ``SCALE_NAME`` on every context that asks for it."""

    def __init__(self) -> None:
        self._value = 1.0
        self._arrays: dict[mx.Context, NDArray] = {}

    def array(self, ctx: mx.Context) -> NDArray:
        """FP32 of shape (1,) on ``ctx``, kept at the current scale."""
        if ctx not in self._arrays:
            self._arrays[ctx] = mx.nd.full((1,), self._value, ctx=ctx, dtype="float32")
        return self._arrays[ctx]

    def set(self, value: float) -> None:
        """Use ``value`` from the next backward on, also for forwards that have already run."""
        if value == self._value:
            return
        self._value = value
        for array in self._arrays.values():
            array[:] = value
