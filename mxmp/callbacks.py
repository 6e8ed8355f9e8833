"""Errors in functions that MXNet calls: ctypes prints them and goes on; here the code that called MXNet raises them."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator

__all__ = ["KeptError", "hold_interrupts"]


class KeptError:
    """Keeps the first exception of the blocks whose context manager it is, until ``raise_it``.

    For the body of a function that MXNet calls. ``KeyboardInterrupt`` is kept too, but may come before the block is
    entered: use ``hold_interrupts`` where MXNet is called.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._error = self._error or error
        return True

    def raise_it(self) -> None:
        """Raise the exception that was kept, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends: for a call of MXNet's during which MXNet calls Python.

    Python runs signal handlers in the main thread only, so in other threads there is nothing to hold.
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
