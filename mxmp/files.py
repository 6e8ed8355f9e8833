"""Files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

__all__ = ["replacing"]


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
