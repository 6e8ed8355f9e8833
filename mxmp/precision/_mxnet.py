"""MXNet's private attributes that ``mxmp.precision`` reads, and its bfloat16. Tests check them in MXNet 1.9.1."""

from __future__ import annotations

import ctypes
from typing import Any, Mapping

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, c_str, check_call

# MXNet's bfloat16, which NumPy does not have.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def dtype_name(dtype: Any) -> str:
    """Return the name of an array's dtype, such as ``"float32"`` or ``"bfloat16"``."""
    dtype = np.dtype(dtype)
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def numpy_dtype(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def exact_text(number: Any) -> str:
    """Return a NumPy number as text without an exponent: MXNet reads attributes of operators from text, and misreads
    some exponents, about a fifth of the small values of ``rescale_grad`` by one bit."""
    return np.format_float_positional(number, trim="-")


# The class of Symbols of MXNet's NumPy interface.
NumpySymbol: Any = mx.sym.np._Symbol


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Return whether ``symbol`` is one of ``mx.sym.np``."""
    return isinstance(symbol, NumpySymbol)


def name_in_graphs(operator: str) -> str:
    """Return an operator's name in graphs (``"Concat"`` for ``"concat"``); ``""`` if MXNet does not have it."""
    handle, name = ctypes.c_void_p(), ctypes.c_char_p()
    if _LIB.NNGetOpHandle(c_str(operator), ctypes.byref(handle)) != 0:
        return ""
    check_call(_LIB.MXSymbolGetAtomicSymbolName(handle, ctypes.byref(name)))
    return (name.value or b"").decode()


def count_own_gradients(attrs: Mapping[str, str], num_inputs: int) -> int:
    """Return of how many inputs, the first ones, a ``Custom`` loss head writes gradients of its own; 0 if it is no
    head."""
    registry = mx.operator._registry.ref_holder
    before = set(registry)
    # MXNet creates a CustomOpProp for each Custom node, so a second node with the same inputs and parameters is made.
    node = mx.sym.Custom(*(mx.sym.var(f"in{i}") for i in range(num_inputs)), **attrs)
    props = [registry[k] for k in set(registry) - before if isinstance(registry[k], mx.operator.CustomOpProp)]
    if node is None or not props:
        return 0
    prop = props[-1]
    outputs = [("out", i) for i in range(len(prop.list_outputs()))]
    inputs = [("in", i) for i in range(len(prop.list_arguments()))]
    # A backward that reads no gradient of an output is that of a loss head. Auxiliary states have no gradients.
    reads = any(kind == "out" for kind, _ in prop.declare_backward_dependency(outputs, inputs, []))
    return 0 if reads else len(inputs)
