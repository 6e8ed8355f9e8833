"""The operators that MXNet itself registers, with their inputs and attributes."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from mxnet.base import _LIB, check_call


class Registered(NamedTuple):
    """What MXNet says of an operator; ``attrs`` maps names to their type strings."""

    canonical: str
    inputs: tuple[str, ...]
    variadic: bool
    attrs: dict[str, str]


def registered() -> dict[str, Registered]:
    names, size = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_uint()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(names)))
    return {name: describe(name) for name in sorted(names[i].decode() for i in range(size.value))}


def handle(name: str) -> ctypes.c_void_p:
    op = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(op)))
    return op


def describe(name: str) -> Registered:
    text, count, texts = ctypes.c_char_p, ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)
    real, doc, variadic, returns = text(), text(), text(), text()
    args, types, docs = texts(), texts(), texts()
    out = (real, doc, count, args, types, docs, variadic, returns)
    check_call(_LIB.MXSymbolGetAtomicSymbolInfo(handle(name), *map(ctypes.byref, out)))
    pairs = [(args[i].decode(), types[i].decode()) for i in range(count.value)]
    inputs = tuple(arg for arg, kind in pairs if "NDArray" in kind or "Symbol" in kind)
    return Registered(real.value.decode(), inputs, bool(variadic.value), {a: t for a, t in pairs if a not in inputs})


OPS = registered()
FORWARD = {name: op for name, op in OPS.items() if "backward" not in name}
