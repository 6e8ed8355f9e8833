"""Whether mxmp traces a block on this thread, and what the trace knows of its variables (``known.py``), if anything."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Iterator

# Global: whether a trace runs on this thread, and what it knows, for attributes of Symbols, which hold nothing.
_local = threading.local()


@contextmanager
def tracing(knowledge: Any) -> Iterator[None]:
    """Trace blocks on this thread in the ``with`` block, with Symbols that know what ``knowledge`` has, if not None."""
    # The code that is traced may call another converted block on arrays, which is traced inside this trace.
    outer = is_tracing(), present_knowledge()
    _local.tracing, _local.knowledge = True, knowledge
    try:
        yield
    finally:
        _local.tracing, _local.knowledge = outer


def is_tracing() -> bool:
    """Return whether mxmp is tracing a block on this thread, and so calls the block's children with Symbols."""
    # If not, and a block gets Symbols, MXNet may be tracing an unconverted block around it, which would lose the casts.
    return getattr(_local, "tracing", False)


def present_knowledge() -> Any:
    """Return the ``Knowledge`` of the trace that runs on this thread; None without one, or if it knows nothing."""
    return getattr(_local, "knowledge", None)
