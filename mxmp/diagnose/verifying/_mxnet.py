"""The functions of MXNet's library that a process of ``verify`` replaces."""

from __future__ import annotations

from typing import Any, Callable

from mxnet.base import _LIB


def before_files_are_written(call: Callable[[bytes], None]) -> None:
    """Let ``call(path)`` precede each file that MXNet's library writes by itself; for a process of ``verify``."""

    def after(function: Any) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            for arg in args:
                path = getattr(arg, "value", arg)
                if isinstance(path, bytes):
                    call(path)
                    break
            return function(*args)

        return write

    for name in ("MXNDArraySave", "MXSymbolSaveToFile", "MXRecordIOWriterCreate"):
        setattr(_LIB, name, after(getattr(_LIB, name)))
