"""Errors in functions that MXNet calls: ctypes prints them and goes on; here the code that called MXNet raises them."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator


class KeptError:
    """A context manager that keeps the first exception of its ``with`` blocks, until ``raise_it`` raises it.

    It is meant for the body of a Python function that MXNet calls through ctypes: ctypes would print the function's
    exception and go on, and the code that called MXNet would never see it. One object may be used for any number of
    blocks, one after the other. It keeps ``KeyboardInterrupt`` too. But Ctrl-C may arrive in the function before the
    block begins; therefore the code that calls MXNet should do so within ``hold_interrupts()``.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        """Do nothing: an exception that was kept before stays kept."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Keep the block's exception, unless one is kept already; return True, so that no exception goes further."""
        self._error = self._error or error
        return True

    def raise_it(self) -> None:
        """Raise the kept exception, if there is one, and forget it: a second call raises nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the ``with`` block ends; if it came, once or often, SIGINT's handler is then called once.

    It is meant for a call of MXNet during which MXNet calls Python functions: a ``KeyboardInterrupt`` raised in one of
    these would be lost. Does nothing in a thread other than the main one, since Python runs signal handlers in the main
    thread only; nor where SIGINT has no Python handler.
    """
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
