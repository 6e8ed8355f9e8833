"""Loss scaling for heads that ignore the gradient from above (SoftmaxOutput, MakeLoss, ...).

Such a head writes its own gradient, with a ``grad_scale`` that is fixed when the graph is bound. A
scaled loss never reaches it, so the scale goes behind it instead: an identity in front of the head
that multiplies the gradient by ``s``::

    t = sign_ste(x);  y = BlockGrad(x) + (t - BlockGrad(t)) * s

Forward, ``y`` is ``x``, infinities and NaN included; backward, dx is dy * s exactly. ``s`` is an input
of the graph, so a new scale rebinds nothing.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from . import _mxnet
from .graph import Entry, Graph, Node
from .record import Record, recorded_name
from .rules import RULES, Kind, rule_of

__all__ = [
    "HEAD_OPERATORS",
    "SCALE_NAME",
    "call_with_scale",
    "check_loss",
    "head_gradient",
    "heads_scaled_by",
    "is_converted",
    "note_call",
    "refuse_unscaled_heads",
    "scale_heads",
]

SCALE_NAME = "mxmp_loss_scale"


def scale_heads(graph: Graph) -> bool:
    """Put the scaling identity in front of every loss head of ``graph``, in place.

    The scale is a variable ``SCALE_NAME``, FP32 of shape (1,). Returns whether there was a head.
    """
    heads = [(node, positions) for node in graph.nodes() if (positions := _own_gradients(node))]
    if not heads:
        return False
    scale = Entry(Node("null", SCALE_NAME, {"__shape__": "(1,)", "__dtype__": "0"}))
    for head, positions in heads:
        for position in positions:
            head.inputs[position] = _scaled(head.inputs[position], scale, f"{head.name}_in{position}")
    return True


def check_loss(loss: NDArray, scale: float) -> None:
    """Raise where ``loss`` is no NDArray (``TypeError``), or is float16 that cannot hold the scale."""
    if not isinstance(loss, NDArray):
        raise TypeError(f"loss must be an NDArray or a list of them, got {type(loss).__name__}")
    if loss.dtype == np.float16 and scale > 2.0**15:
        raise ValueError(
            f"the loss is float16, which cannot hold the loss scale {scale:g}: compute the loss in FP32 "
            "(loss_fn(net(x).astype('float32'), y))"
        )


def head_gradient(loss: NDArray, scale: float) -> NDArray:
    """What backward of ``loss * scale`` starts from, in the loss's dtype, shape and kind of array."""
    check_loss(loss, scale)
    kind = mx.np if isinstance(loss, mx.np.ndarray) else mx.nd
    return kind.ones_like(loss) * scale


def refuse_unscaled_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` for a recorded head that would write unscaled gradients.

    For what is inside a plain hybridized block see ``refuse_hidden_heads``. Takes 0.7 ms for a ResNet-50.
    """
    if HEAD_OPERATORS.isdisjoint(record.operators):
        return
    for node in record.nodes():
        if not all(_is_scaled(node.inputs[p]) for p in _own_gradients(node)):
            raise ValueError(
                f"{node.op} writes its own gradient and ignores the loss scale {scale:g}, by which the update "
                "would divide: put it inside a net that goes through mxmp.convert, or use loss_scale=None"
            )


# Operators that are heads with some attributes, or always.
HEAD_OPERATORS = {"Custom"}
HEAD_OPERATORS |= {op for op, rule in RULES.items() if Kind.HEAD in (rule.kind, *(w.kind for w in rule.when))}


def _is_scaled(x: Entry) -> bool:
    """Whether ``x`` is what ``_scaled`` makes; by its operators, since a recorded graph has other names."""
    steps = ("elemwise_add", "broadcast_mul", "elemwise_sub", "_contrib_sign_ste")
    for op, position in zip(steps, (1, 0, 0, 0)):
        if x.node.op != op:
            return False
        x = x.node.inputs[position]
    return True


def _own_gradients(node: Node) -> tuple[int, ...]:
    """Positions of the inputs whose gradient ignores the one from above."""
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


# Global: the scale arrays that recorded forwards read, by the names that autograd gave them, as a record is no object
# of Python's. The oldest that no backward reached fall out.
_recorded: dict[str, NDArray] = {}
# Global, likewise: the nodes that recorded forwards of converted blocks made, by name.
_calls: dict[str, None] = {}
_LIVE_RECORDS = 1 << 14
# Global: for these two.
_lock = threading.Lock()
# Global: whether this thread is inside a scaled backward, of whatever trainer.
_local = threading.local()


def call_with_scale(call: Callable[[NDArray], Any], ctx: mx.Context) -> Any:
    """``call`` with what it feeds to ``SCALE_NAME``: FP32 of shape (1,), a 1 that its backward may change."""
    memory = mx.nd.ones((1,), ctx=ctx)
    fed = memory.detach()  # autograd notes in the handle which record it belongs to
    out = call(fed)
    if autograd.is_recording():
        try:
            name = mx.autograd.get_symbol(fed).name
        except mx.MXNetError:  # nothing here needs a gradient, so nothing was recorded
            return out
        _remember(_recorded, name, memory)
    return out


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """A backward from ``record``'s losses in this block, and no other, multiplies gradients of the heads it reaches.

    The record says which forwards it reaches, whoever owns their parameters, and each has a scale of its own.
    MXNet's engine orders the writes before and after among the reads of the backward between them; nothing
    waits. Raises ``RuntimeError`` inside another such block of this thread.
    """
    if getattr(_local, "open", False):
        raise RuntimeError(
            "a scaled backward inside scale_loss would be scaled twice: call autograd.backward there, on the "
            "scaled loss, or trainer.backward(loss) outside"
        )
    reached = _reached(record) if _recorded and value != 1.0 else []
    _local.open = True
    try:
        _set(reached, value)
        yield
    finally:
        _set(reached, 1.0)
        _local.open = False


def note_call(out: NDArray) -> None:
    """A converted block has returned ``out``, recorded perhaps: no head in it needs to be looked for."""
    name = recorded_name(out)
    if name is not None:
        _remember(_calls, name, None)


def is_converted(node: str) -> bool:
    """Whether a recorded node is a call of a converted block, in which a scale stands in front of every loss head."""
    with _lock:
        return node in _calls


def _remember(store: dict, name: str, value: Any) -> None:
    with _lock:
        store[name] = value
        while len(store) > _LIVE_RECORDS:
            del store[next(iter(store))]


def _reached(record: Record) -> list[NDArray]:
    with _lock:
        return [_recorded[name] for name in record.leaves if name in _recorded]


def _set(scales: Sequence[NDArray], value: float) -> None:
    with autograd.pause():
        for scale in scales:
            scale[:] = value
