"""Code for arrays that MXNet takes for something else if it runs on Symbols, without a word."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import autograd

from ..messages.callers import is_called_by_user
from .tracing import is_tracing

_KNOWN = f"{__package__}.known"


@contextmanager
def reading_as_arrays() -> Iterator[None]:
    """Let code in a trace, the ``with`` block, mean on Symbols what it means on arrays, or raise ``TypeError``.
    One thread at a time may enter it; what others do with Symbols means what it did."""
    with ExitStack() as stack:
        for owner, name, reading in _READ_OTHERWISE:
            method = getattr(owner, name)
            stack.callback(setattr, owner, name, method)
            setattr(owner, name, reading(method))
        yield


def _reshaping(reshape: Callable) -> Callable:
    def called(symbol: Any, *shape: Any, **kwargs: Any) -> Any:
        # MXNet takes the second size for ``reverse``, the third for ``target_shape``, and then may crash.
        is_spread = len(shape) > 1 and all(isinstance(size, int) for size in shape)
        return reshape(symbol, shape, **kwargs) if is_spread else reshape(symbol, *shape, **kwargs)

    return called


def _of_rows(said: str) -> Callable[[Callable], Callable]:
    """Refuse what is of the rows of an array, and of a Symbol's outputs, if a Symbol has one."""

    def reading(method: Callable) -> Callable:
        def called(symbol: Any, *args: Any) -> Any:
            # MXNet's own code for Symbols counts and takes their outputs.
            is_users = is_tracing() and is_called_by_user(through=_KNOWN) and not (args and isinstance(args[0], str))
            if is_users and len(symbol.list_outputs()) == 1:
                raise TypeError(
                    f"{said} of an array, and of a Symbol the outputs. A graph is made of Symbols, and this one has "
                    "one output. Write F.slice_axis, F.take or F.split for rows, x.shape[0] for their number, or x "
                    "alone if you mean all of it"
                )
            return method(symbol, *args)

        return called

    return reading


def _without_functions(call: Callable) -> Callable:
    def called(function: autograd.Function, *inputs: Any) -> Any:
        # MXNet takes the Symbols' handles for those of arrays, and crashes; not recording, it drops the gradient.
        if any(isinstance(each, mx.sym.Symbol) for each in inputs):
            raise TypeError(
                f"{type(function).__name__} is an autograd.Function, which is no operator of a graph: write an "
                "mx.operator.CustomOp for a gradient of your own; F.BlockGrad(2 * x) - x reverses one"
            )
        return call(function, *inputs)

    return called


_SYMBOL: Any = mx.sym.Symbol
_READ_OTHERWISE: list[tuple[Any, str, Callable]] = [
    (_SYMBOL, "reshape", _reshaping),
    (_SYMBOL, "__getitem__", _of_rows("x[i] is a part")),
    (_SYMBOL, "__iter__", _of_rows("for row in x, or *x, is of the rows")),
    (_SYMBOL, "__len__", _of_rows("len(x) counts the rows")),
    (autograd.Function, "__call__", _without_functions),
]
