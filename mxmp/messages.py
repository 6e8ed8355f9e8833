"""What to say of what a user wrote: a name, a network, a keyword, a dtype. And whose code calls: a warning names it."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import currentframe, signature
from types import FrameType
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence, TypeVar

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .callbacks import last_line
from .policy import Policy

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INSIDE = ("mxnet", "mxmp", "contextlib")
# What to do with what is no network of the kind that a function takes.
_INSTEAD: dict[Any, str] = {
    mx.sym.Symbol: "for a Symbol use mxmp.cast_symbol, or mxmp.Module to train it",
    mx.gluon.Block: "for a Block use mxmp.convert and mxmp.Trainer",
    mx.mod.BaseModule: "a Module is converted when it is made, mxmp.Module(symbol, policy='float16'); its graph is "
    ".symbol",
    mx.gluon.Trainer: "that is a trainer, pass the network that it trains",
    mx.gluon.ParameterDict: "those are parameters, pass the net itself",
    (list, tuple, set, dict): "call it for each network",
    (NDArray, np.ndarray): "that is an array, the network comes first",
}
_FIELDS = [field.name for field in fields(Policy)]


def class_of(value: object) -> str:
    """Return the class of a value with its module, for a message: ``"mxnet.gluon.trainer.Trainer"``, ``"list"``."""
    return f"{type(value).__module__}.{type(value).__name__}".replace("builtins.", "")


def some(names: Sequence[str], limit: int = 3) -> str:
    """Return ``"a, b, c and 2 more"``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about a name that is none of ``known``, ``"; did you mean 'policy'?"``, or ``""``."""
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def instead(got: Any, wants_symbol: bool = False) -> str:
    """Return the end of a message about ``got``, which is no network of the right kind; ``""`` if nothing is known."""
    if isinstance(got, type):
        return f": that is a class, make an object of it, {got.__name__}(...)"
    if isinstance(got, (str, os.PathLike)):
        load = "mx.sym.load(file)" if wants_symbol else "gluon.SymbolBlock.imports(symbol_file, ['data'], params_file)"
        return f": load it from its files first, {load}"
    return next((f": {text}" for kind, text in _INSTEAD.items() if isinstance(got, kind)), "")


@contextmanager
def dtypes_explained(inputs: Iterable[Any]) -> Iterator[None]:
    """Say what to do where MXNet refuses inputs, arrays or DataDescs, beside FP32 weights, such as float64 data."""
    try:
        yield
    except RuntimeError as error:  # MXNetError is one, and ``simple_bind`` raises others
        odd = sorted({np.dtype(each.dtype).name for each in inputs} - {"float32"})
        said = last_line(error)
        mixed = re.search(r"expected (\w+), got (\w+)", said)
        if not (("requires uniform type" in said and odd) or (mixed and {*mixed.groups()} & {*odd})):
            raise
        raise mx.MXNetError(
            f"an input is {' or '.join(odd)}, and an operator multiplies it by weights of another dtype: call "
            f"x.astype('float32') first. MXNet says: {said}"
        ) from error


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError``, with what was meant, if a keyword that ``function`` is given is none of ``known``."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function} takes no argument {name!r}{_keyword_meant(name, known)}")


def _keyword_meant(name: str, known: Collection[str]) -> str:
    if "policy" in known and name in _FIELDS:
        return f"; that is a field of the policy, policy=mxmp.Policy('float16', {name}=...)"
    hint = did_you_mean(name, known)
    if name in ("dtype", "compute", "compute_dtype", "precision", "amp", "fp16", "policy") and not hint:
        takes = "the dtype is the policy, policy='float16'"
        hint = f"; {takes}" if "policy" in known else "; mxmp.convert(net, 'float16') says what a net computes in"
    return hint


def keywords_of(kind: type) -> list[str]:
    """Return what the constructors of a class, and of those that it extends, take."""
    return [name for base in kind.__mro__[:-1] for name in signature(base.__init__).parameters]  # type: ignore[misc]


def keywords_explained(function: _Function) -> _Function:
    """Let ``function`` say what was meant where it is given a keyword that it does not take, or too many values."""
    parameters = signature(function).parameters
    known = [name for name in parameters if name != "self"]
    ordered = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    called_as = function.__qualname__.partition(".")[0]

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check_keywords(called_as, kwargs, known)
        if len(args) > len(ordered):
            first = ", ".join(name for name in ordered if name != "self")
            others = [f"{name}=..." for name in known if name not in ordered]
            name = f"; write {' or '.join(others)} with its name" if others else ""
            raise TypeError(f"{called_as} takes {first or 'nothing'} by position, got {args[-1]!r:.80} too{name}")
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, and not at one in MXNet or mxmp."""
    level, frame = 1, currentframe()
    while frame is not None and _package_of(frame) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def is_called_by_user() -> bool:
    """Return whether code outside mxnet and mxmp directly called the function that calls this one."""
    # MXNet's own code calls the same methods as a user: ``data`` when it infers shapes, ``set_data`` to load a file,
    # ``grad`` in its Trainer, and a Module's executors in each step. A user who gets a float16 array may write into it,
    # so that it is compared with its FP32 master in each step.
    frame = currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame is not None and _package_of(frame) not in ("mxnet", "mxmp")


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
