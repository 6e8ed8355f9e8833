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
    """Raise the ``OSError`` that ``replacing(path)`` would raise where ``path`` cannot be written.

    Creates an empty temporary file beside ``path`` and removes it; ``path`` itself is not touched. For long
    computations, which would otherwise fail only at their end.
    """
    target = os.path.realpath(path)
    with _errors_named(path):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = _temporary_beside(target)
        open(temporary, "wb").close()
        os.unlink(temporary)


def read_json(path: str) -> Any:
    """Return the parsed content of a JSON file.

    Raises
    ------
    ValueError
        The file is not in UTF-8, is not JSON, or nests deeper than Python can follow. The message does not name
        ``path``: the caller adds it.
    OSError
        The file cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield the path of a temporary file, which is renamed to ``path`` when the block ends without an error.

    The caller writes the temporary file, which lies beside ``path``. So ``path`` holds the old content or the whole new
    one, whenever the process dies. After an error in the block the temporary file is removed, and the old file stands.

    Raises
    ------
    OSError
        The folder is missing or read-only, or the disk is full. The message names ``path``, not the temporary file.
    """
    with replacing_all(path) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(*paths: str) -> Iterator[list[str]]:
    """Yield one temporary path for each of ``paths``; all are renamed when the block ends without an error.

    As ``replacing``, for files that belong together: no file is renamed before all have been written and flushed to the
    disk, so a full disk leaves all the old files. A path that is a symbolic link stays one; the file that it points to
    is replaced.
    """
    # A link stays one: what it points to is replaced.
    targets = [os.path.realpath(path) for path in paths]
    temporaries = [_temporary_beside(target) for target in targets]
    try:
        for temporary, path in zip(temporaries, paths):
            with _errors_named(path):
                open(temporary, "wb").close()  # MXNet's writers do not say why a file cannot be opened
        with _errors_named(*paths):
            yield temporaries
        for temporary, path in zip(temporaries, paths):  # a disk may turn out to be full only now
            with _errors_named(path), open(temporary, "rb") as written:
                os.fsync(written.fileno())
        for temporary, target, path in zip(temporaries, targets, paths):
            with _errors_named(path):
                os.replace(temporary, target)
    finally:
        for temporary in filter(os.path.exists, temporaries):
            os.unlink(temporary)


def _temporary_beside(target: str) -> str:
    """Return a path in the folder of ``target`` that no other process or thread uses: ``.NAME.PROCESS.THREAD.part``."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.part")


@contextmanager
def _errors_named(*paths: str) -> Iterator[None]:
    """Raise again an ``OSError`` of the block with ``paths`` as its file name, joined by commas.

    Errors of writing name the temporary file (``*.part``) or no file. An error that names any other file, or has no
    error number, is raised unchanged.
    """
    try:
        yield
    except OSError as error:
        other_file = error.filename is not None and not str(error.filename).endswith(".part")
        if error.errno is None or other_file:
            raise
        raise OSError(error.errno, error.strerror, ", ".join(map(os.fspath, paths))) from error
