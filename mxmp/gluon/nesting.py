"""How arrays are nested in the arguments and outputs of a block, with Python values such as bools between them.

A Python value among the arguments is a constant of the graph; one among the outputs is returned as in the trace.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet

# Values that are equal wherever they print the same, and do not change.
_CONSTANTS = (bool, int, float, complex, str, bytes, np.generic, np.dtype, type, mx.Context)


def is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS)


# From the number of a leaf (array, None or Python value), counted through all nested lists, to a Python value there.
Constants = Dict[int, Any]


def split(args: Sequence) -> tuple[tuple, Constants]:
    """Return the arguments of a call with None in place of each Python value, and these values.
    Raises ``ValueError`` for what is no array, Symbol, None, constant or list of these."""
    constants: Constants = {}

    def without_constant(number: int, value: Any) -> Any:
        if value is None or isinstance(value, (NDArray, mx.sym.Symbol)):
            return value
        if not is_constant(value):
            raise ValueError(f"got a {type(value).__name__}")
        constants[number] = value
        return None

    return tuple(_with_leaves(args, without_constant)), constants


def joined(args: Sequence, constants: Constants) -> list:
    """Return arguments with the Python values that ``split`` took out."""
    return _with_leaves(args, constants.get) if constants else list(args)


def _with_leaves(args: Sequence, replaced: Callable[[int, Any], Any]) -> list:
    """Return nested lists and tuples with ``replaced(number, leaf)`` for each leaf, counted through all of them."""
    numbers = itertools.count()

    def read(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return (tuple if type(value) is tuple else list)(map(read, value))
        return replaced(next(numbers), value)

    return list(map(read, args))


def key_of(constants: Constants) -> tuple:
    """Return a hashable key; equal keys mean equal values of the same types in the same places."""
    # 1, True and 1.0 are equal, and so are 0.0 and -0.0; a NaN does not equal itself.
    return tuple((i, type(each), repr(each), each if isinstance(each, type) else 0) for i, each in constants.items())


class Nesting(NamedTuple):
    """How the arrays of a block's output are nested."""

    # Of the container: list, tuple, a namedtuple or dict; None for an array, and for a Python value.
    kind: type | None
    # What the container holds, or the Python value; for an array the number of outputs of its operator, mostly 1.
    items: Any
    # Whether it is an array, or the list of an operator's outputs.
    is_array: bool = False
    # Whether it is one of ``mx.np``.
    is_numpy: bool = False


def nesting_of(value: Any, arrays: list) -> Nesting:
    """Return the nesting of a block's output, and append its arrays or Symbols to ``arrays`` in order.
    Raises ``ValueError`` for a value that no graph returns."""
    if isinstance(value, (NDArray, mx.sym.Symbol)):
        arrays.append(value)
        count = len(value.list_outputs()) if isinstance(value, mx.sym.Symbol) else 1
        return Nesting(None, count, is_array=True, is_numpy=_mxnet.is_numpy(value))
    if isinstance(value, dict):
        return Nesting(dict, {key: nesting_of(each, arrays) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        is_tuple = type(value) is tuple or hasattr(value, "_fields")
        return Nesting(type(value) if is_tuple else list, [nesting_of(each, arrays) for each in value])
    if value is None or is_constant(value):
        return Nesting(None, value)
    raise ValueError(
        f"it returns a {type(value).__name__}; a graph returns arrays, None, bools, numbers and strings, in lists, "
        "tuples and dicts"
    )


def is_plain(nesting: Nesting) -> bool:
    """Return whether there are only arrays in lists and tuples, as MXNet's own graphs return them."""
    if nesting.kind is None:
        return nesting.is_array
    return nesting.kind is not dict and all(map(is_plain, nesting.items))


def nested(nesting: Nesting, arrays: Sequence) -> Any:
    left = list(arrays)

    def read(each: Nesting) -> Any:
        if each.is_array:
            taken = [_mxnet.of_kind(array, each.is_numpy) for array in left[: each.items]]
            del left[: each.items]
            return taken[0] if each.items == 1 else taken
        if each.kind is None:
            return each.items
        if each.kind is dict:
            return {key: read(item) for key, item in each.items.items()}
        items = [read(item) for item in each.items]
        return each.kind(*items) if hasattr(each.kind, "_fields") else each.kind(items)

    return read(nesting)
