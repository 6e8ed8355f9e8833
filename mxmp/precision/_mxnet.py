"""What this room reaches behind MXNet's public interface. A test holds each against 1.9.1."""

from __future__ import annotations

from typing import Mapping

import mxnet as mx

__all__ = ["custom_op_reads_gradient", "has_operator", "is_numpy"]


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Return whether it is a Symbol of ``mx.sym.np``."""
    return isinstance(symbol, mx.sym.np._Symbol)


def has_operator(name: str) -> bool:
    """Return whether MXNet registers an operator, internal ones (``_plus_scalar``) included."""
    return hasattr(mx.sym, name) or hasattr(mx.sym._internal, name)


def custom_op_reads_gradient(attrs: Mapping[str, str], num_inputs: int) -> bool:
    """Return whether the backward of a Custom operator reads the gradient from above.

    Neither the graph nor any public call says so, and a declaration by the user could be forgotten. MXNet
    keeps the ``CustomOpProp`` of every Custom node that it makes, so this makes one more, with the same
    attributes, and reads it.
    """
    registry = mx.operator._registry.ref_holder
    before = set(registry)
    node = mx.sym.Custom(*(mx.sym.var(f"in{i}") for i in range(num_inputs)), **attrs)
    props = [registry[k] for k in set(registry) - before if isinstance(registry[k], mx.operator.CustomOpProp)]
    if node is None or not props:
        return True
    prop = props[-1]
    outputs = [("out", i) for i in range(len(prop.list_outputs()))]
    inputs = [("in", i) for i in range(len(prop.list_arguments()))]
    return any(kind == "out" for kind, _ in prop.declare_backward_dependency(outputs, inputs, []))
