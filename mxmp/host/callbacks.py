"""Errors in functions that MXNet calls, which ctypes prints and forgets, and the line of an error that says why."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator


class KeptError:
    """Keeps the first exception of its ``with`` blocks, in functions that MXNet calls, until ``raise_it``.
    Ctrl-C may come before such a block begins: call MXNet within ``hold_interrupts()``."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        """Do nothing: an earlier exception stays kept."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._error = self._error or error
        return True

    def raise_it(self) -> None:
        """Raise the kept exception, if there is one, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def last_line(error: object) -> str:
    """Return the last line that names an error, else the last one: MXNet's message comes after its stack trace."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1]).strip()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the ``with`` block ends: raised in a function that MXNet calls, it would be lost."""
    # Python runs signal handlers in the main thread alone.
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
