"""Code for arrays that MXNet takes for something else if it runs on Symbols, without a word."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import autograd
from mxnet.base import integer_types

from ..messages.callers import is_called_by_user
from ..precision._mxnet import NumpySymbol
from . import _mxnet
from .tracing import is_tracing

_KNOWN = f"{__package__}.known"


@contextmanager
def reading_as_arrays() -> Iterator[None]:
    """Let code in a trace, the ``with`` block, mean on Symbols what it means on arrays, or raise ``TypeError``.
    One thread at a time may enter it; what others do with Symbols means what it did."""
    with ExitStack() as stack:
        for owner, name, reading in _READ_OTHERWISE:
            own = vars(owner).get(name)
            stack.callback(*((setattr, owner, name, own) if own else (delattr, owner, name)))
            setattr(owner, name, reading(own))
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


def _refused(said: str) -> Callable[[Callable], Callable]:
    def reading(method: Callable) -> Callable:
        def called(symbol: Any, *args: Any) -> Any:
            if not is_tracing() or len(symbol.list_outputs()) > 1:
                return method(symbol, *args)
            raise TypeError(said)

        return called

    return reading


def _indexing(getitem: Callable) -> Callable:
    """Take of one Symbol of ``mx.np`` what an array has there, at numbers, slices, None and ``...``."""

    def called(symbol: Any, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not is_tracing() or len(symbol.list_outputs()) > 1 or isinstance(key, str):
            return getitem(symbol, key)
        if not all(each is None or each is ... or _is_place(each) for each in keys):
            raise TypeError(
                "x[i] with an array, list or bool i is no operator of a graph. Write F.np.take(x, i, axis=0) for rows, "
                "F.npx.pick(x, i) for one element of each, F.np.where(i, x, 0) for a mask"
            )
        before: tuple = keys
        after: tuple = ()
        if any(each is ... for each in keys):
            at = [each is ... for each in keys].index(True)
            before, after = keys[:at], keys[at + 1 :]
            if any(each is not None for each in after):
                rest = symbol.ndim - sum(each is not None for each in (*before, *after))
                before, after = (*before, *[slice(None)] * rest, *after), ()
        places = tuple(each for each in before if each is not None)
        is_one = len(places) == 1 and (isinstance(places[0], slice) or places[0] >= 0)
        taken = getitem(symbol, places[0] if is_one else places)  # MXNet takes nothing at a negative number alone
        for axis, each in enumerate(each for each in before if not isinstance(each, integer_types)):
            taken = taken if each is not None else mx.sym.np.expand_dims(taken, axis)
        for _ in after:
            taken = mx.sym.np.expand_dims(taken, -1)
        return taken

    return called


def _is_place(key: Any) -> bool:
    return isinstance(key, slice) or (isinstance(key, integer_types) and not isinstance(key, bool))


def _method(function: str) -> Callable[[Any], Callable]:
    return lambda _: lambda *args, **kwargs: getattr(mx.sym.np, function)(*args, **kwargs)


def _of_scale_one(rayleigh: Callable) -> Callable:
    return lambda scale=1.0, *args, **kwargs: rayleigh(scale, *args, **kwargs)  # MXNet's default for Symbols is 0


def _of_any_batch(begin_state: Callable) -> Callable:
    def called(layer: Any, batch_size: int = 0, *args: Any, **kwargs: Any) -> Any:
        # MXNet's layers write 0 for a size that they do not know, which with np_shape is known to be 0.
        unknown = -1 if is_tracing() and mx.util.is_np_shape() else 0
        return begin_state(layer, batch_size or unknown, *args, **kwargs)

    return called


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


# Methods that arrays of ``mx.np`` have, and Symbols lack: the names of functions.
_METHODS = {
    **{name: name for name in ("all", "any", "broadcast_to", "copy")},
    **{f"__{name}__": name for name in ("abs", "invert", "matmul", "round")},
    **{f"__{name}__": f"bitwise_{name}" for name in ("and", "or", "xor")},
}
_SYMBOL: Any = mx.sym.Symbol
_NUMPY = NumpySymbol
_OF_ROWS = "is of the rows of an array, and a graph is made of Symbols, which have none. Write"
_READ_OTHERWISE: list[tuple[Any, str, Callable]] = [
    (_SYMBOL, "reshape", _reshaping),
    (_SYMBOL, "__getitem__", _of_rows("x[i] is a part")),
    (_SYMBOL, "__iter__", _of_rows("for row in x, or *x, is of the rows")),
    (_SYMBOL, "__len__", _of_rows("len(x) counts the rows")),
    (_NUMPY, "__getitem__", _indexing),
    (_NUMPY, "__iter__", _refused(f"for row in x, or *x, {_OF_ROWS} F.np.split or x[i]")),
    (_NUMPY, "__len__", _refused(f"len(x) {_OF_ROWS} x.shape[0]")),
    (_NUMPY, "__setitem__", _refused("x[i] = y changes an array, and no Symbol. Write F.np.where or F.np.concatenate")),
    (_NUMPY, "__itruediv__", lambda _: _SYMBOL.__itruediv__),
    *[(_NUMPY, name, _method(function)) for name, function in _METHODS.items()],
    (mx.sym.np.random, "rayleigh", _of_scale_one),
    (_mxnet.RecurrentLayer, "begin_state", _of_any_batch),
    (autograd.Function, "__call__", _without_functions),
]
