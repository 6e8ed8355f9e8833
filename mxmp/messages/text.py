"""Words of a message: a class, a list of names, the name that was meant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Iterable, Sequence


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
