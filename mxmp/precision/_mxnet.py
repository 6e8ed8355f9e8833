"""MXNet's private attributes that ``mxmp.precision`` reads. A test checks each against MXNet 1.9.1."""

from __future__ import annotations

import ctypes
from typing import Mapping

import mxnet as mx
from mxnet.base import _LIB, c_str, check_call


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Return whether ``symbol`` was made by MXNet's NumPy interface (``mx.sym.np``), not by ``mx.sym``."""
    return isinstance(symbol, mx.sym.np._Symbol)


def name_in_graphs(operator: str) -> str:
    """Return the name that an operator has in graphs: ``"Concat"`` for its alias ``"concat"``.

    Returns ``""`` if MXNet, with the libraries that ``mx.library`` has loaded, has no operator of this name.
    """
    handle, name = ctypes.c_void_p(), ctypes.c_char_p()
    if _LIB.NNGetOpHandle(c_str(operator), ctypes.byref(handle)) != 0:
        return ""
    check_call(_LIB.MXSymbolGetAtomicSymbolName(handle, ctypes.byref(name)))
    return (name.value or b"").decode()


def count_own_gradients(attrs: Mapping[str, str], num_inputs: int) -> int:
    """Return for how many of its inputs, the first ones, a ``Custom`` operator writes a gradient of its own.

    If its backward reads no gradient of an output, the operator is a loss head: scaling the loss does not scale the
    gradients that it writes. Then these are the gradients of all its arguments; the inputs behind them are auxiliary
    states, which have none. Otherwise the result is 0. The answer is that of ``declare_backward_dependency`` of the
    user's ``CustomOpProp``. MXNet creates such an object for each ``Custom`` node, so this function builds a second
    node with the same ``num_inputs`` and ``attrs`` (the arguments of ``mx.sym.Custom``, ``op_type`` among them).
    Returns 0 if MXNet does not create the object.
    """
    registry = mx.operator._registry.ref_holder
    before = set(registry)
    node = mx.sym.Custom(*(mx.sym.var(f"in{i}") for i in range(num_inputs)), **attrs)
    props = [registry[k] for k in set(registry) - before if isinstance(registry[k], mx.operator.CustomOpProp)]
    if node is None or not props:
        return 0
    prop = props[-1]
    outputs = [("out", i) for i in range(len(prop.list_outputs()))]
    inputs = [("in", i) for i in range(len(prop.list_arguments()))]
    reads = any(kind == "out" for kind, _ in prop.declare_backward_dependency(outputs, inputs, []))
    return 0 if reads else len(inputs)
