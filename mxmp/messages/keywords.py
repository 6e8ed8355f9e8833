"""What to say of a keyword that a function does not take."""

from __future__ import annotations

from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, Callable, Collection, Iterable, TypeVar

from ..policy import Policy
from .text import did_you_mean

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FIELDS = [field.name for field in fields(Policy)]


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
