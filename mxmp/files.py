"""Files that appear complete or not at all, and JSON files of unknown origin."""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import contextmanager
from typing import Any, Iterator

__all__ = ["check_writable", "read_json", "replacing", "replacing_all"]


def check_writable(path: str) -> None:
    """Raise the ``OSError`` that ``replacing`` would raise if it cannot write ``path``; change nothing."""
    target = os.path.realpath(path)
    with _naming(path):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = _beside(target)
        open(temporary, "wb").close()
        os.unlink(temporary)


def read_json(path: str) -> Any:
    """Return what a JSON file holds.

    Raises ``ValueError``, which does not name ``path``, where the file is not in UTF-8, is not JSON, or nests deeper
    than Python can follow; and ``OSError`` where it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Give a temporary path beside ``path`` that takes its place when the block ends without an error.

    Raises ``OSError``, which names ``path``, where the folder is missing or read-only, or the disk is full. An old file
    then still stands.
    """
    with replacing_all(path) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(*paths: str) -> Iterator[list[str]]:
    """Give a temporary path for each of several files; none takes its place before all are on the disk."""
    # A link stays one: what it points to is replaced.
    targets = [os.path.realpath(path) for path in paths]
    temporaries = [_beside(target) for target in targets]
    try:
        for temporary, path in zip(temporaries, paths):
            with _naming(path):
                open(temporary, "wb").close()  # MXNet's writers do not say why a file cannot be opened
        with _naming(*paths):
            yield temporaries
        for temporary, path in zip(temporaries, paths):  # a disk may turn out to be full only now
            with _naming(path), open(temporary, "rb") as written:
                os.fsync(written.fileno())
        for temporary, target, path in zip(temporaries, targets, paths):
            with _naming(path):
                os.replace(temporary, target)
    finally:
        for temporary in filter(os.path.exists, temporaries):
            os.unlink(temporary)


def _beside(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.part")


@contextmanager
def _naming(*paths: str) -> Iterator[None]:
    """Raise an ``OSError`` of a write, which names no file or the temporary one, with the names of ``paths``."""
    try:
        yield
    except OSError as error:
        other_file = error.filename is not None and not str(error.filename).endswith(".part")
        if error.errno is None or other_file:
            raise
        raise OSError(error.errno, error.strerror, ", ".join(map(os.fspath, paths))) from error
