"""Symbols that know their dtype, shape and context while mxmp traces a block, for code that asks an array for them.

The graph is then right only for calls with the same; ``Knowledge.needs`` says what was asked for.
"""

from __future__ import annotations

import re
from functools import lru_cache, wraps
from math import prod
from types import FunctionType, ModuleType
from typing import Any, Callable, Mapping

import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.ndarray import NDArray

from . import _mxnet
from .broadcasting import with_broadcasting
from .tracing import present_knowledge


class Knowledge:
    """What a trace knows of the variables of its graph (arrays or Parameters by name), and what the code has asked for.
    ``needs`` gets ``"shape"``, ``"dtype"`` or ``"ctx"``."""

    def __init__(self, variables: Mapping[str, Any], ctx: mx.Context) -> None:
        self.variables, self.ctx = variables, ctx
        self.needs: set[str] = set()

    def arguments(self, functions: Any, values: list, params: dict) -> tuple[Functions, list, dict]:
        """Return what a ``hybrid_forward`` gets, with Symbols that know."""
        return Functions(functions), known(values), known(params)


def known(value: Any) -> Any:
    """Return ``value``, with all Symbols in it changed, in place, to Symbols with the attributes of arrays."""
    if isinstance(value, mx.sym.Symbol):
        if not isinstance(value, _Known):
            kind: Any = type(value)
            value.__class__ = _known_class(kind)
    elif isinstance(value, (list, tuple)):
        for each in value:
            known(each)
    elif isinstance(value, dict):
        known(list(value.values()))
    return value


class Functions:
    """``F`` in a ``hybrid_forward``: a module such as ``mx.sym`` whose operators return ``known`` Symbols."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, ModuleType):
            return Functions(found)
        return _returns_known(found) if callable(found) and not isinstance(found, type) else found

    def __eq__(self, other: Any) -> bool:
        return other is self._module

    def __hash__(self) -> int:
        return hash(self._module)


def _returns_known(function: Callable) -> Callable:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return known(function(*args, **kwargs))

    return called


def _ask(what: str) -> Knowledge:
    knowledge = present_knowledge()
    if knowledge is None:
        raise AttributeError(f"a Symbol has no {what} after the trace")
    knowledge.needs.add(what)
    return knowledge


def _shape(symbol: mx.sym.Symbol) -> tuple[int, ...]:
    found = _ask("shape").variables
    array = found.get(symbol.name) if symbol.list_outputs() == [symbol.name] else None
    if isinstance(array, NDArray):
        return array.shape
    shapes = {name: tuple(found[name].shape) for name in symbol.list_inputs() if name in found and found[name].shape}
    try:
        shape = symbol.infer_shape_partial(**shapes)[1][0]
    except mx.MXNetError:
        shape = with_broadcasting(symbol, shapes).infer_shape_partial(**shapes)[1][0]
    # MXNet writes () for a shape of which it knows nothing, and 0 for such a size. With np_shape these are a scalar's
    # and an empty array's, and it writes None and -1.
    unknown = None if mx.util.is_np_shape() else ()
    if shape is None or shape == unknown or any(size < 0 or (size == 0 and unknown == ()) for size in shape):
        raise ValueError(f"the shape of {symbol.name!r} depends on values, which a graph does not have")
    return tuple(shape)


def _dtype(symbol: mx.sym.Symbol) -> Any:
    found = _ask("dtype").variables
    types = {name: _mxnet.dtype_of(found[name]) for name in symbol.list_inputs() if name in found}
    dtype = symbol.infer_type_partial(**types)[1][0]
    if dtype is None:
        raise ValueError(f"the dtype of {symbol.name!r} does not follow from those of the inputs")
    return dtype


class _Known:
    __slots__ = ()


_ATTRIBUTES = {
    "shape": property(_shape),
    "dtype": property(_dtype),
    "ndim": property(lambda self: len(_shape(self))),
    "size": property(lambda self: prod(_shape(self))),
    "context": property(lambda self: _ask("ctx").ctx),
    "ctx": property(lambda self: _ask("ctx").ctx),
    "stype": property(lambda self: "default"),
    "T": property(lambda self: known(mx.sym.transpose(self))),
}
_LACKS = re.compile(rf"'_?Symbol' object has no attribute '({'|'.join(_ATTRIBUTES)})'")
_KEPT = {"__init__", "__new__", "__del__", "__reduce__", "__getstate__", "__setstate__", "__hash__", "__repr__"}


@lru_cache(maxsize=None)
def _known_class(kind: type) -> type:
    """Return a subclass of ``kind``, a class of Symbols, with an array's attributes; its methods return the like."""
    methods = {
        name: _returns_known(method)
        for base in reversed(kind.__mro__[:-1])
        for name, method in vars(base).items()
        if isinstance(method, FunctionType) and name not in _KEPT
    }
    attributes = {name: get for name, get in _ATTRIBUTES.items() if not hasattr(kind, name)}
    return type(kind.__name__, (_Known, kind), {"__slots__": (), **methods, **attributes})


def asks_for_more(error: Exception) -> bool:
    """Return whether ``error`` says that a Symbol lacks an attribute which ``knowing`` Symbols have."""
    return isinstance(error, AttributeError) and _LACKS.search(str(error)) is not None


def called_with_symbols(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class on Symbols that know, and return such."""
    if not _mxnet.overrides(block, "forward"):
        return known(_mxnet.hybrid_forward(block, Functions(mx.sym), args, known))
    return known(_mxnet.forward(block, args))
