"""Files that appear complete or not at all, and JSON files of unknown origin."""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import contextmanager
from typing import Any, Iterator


def check_writable(path: str) -> None:
    """Raise ``OSError`` if ``path`` cannot be written, before a long computation; ``path`` itself is not touched."""
    target = os.path.realpath(path)
    with _errors_named(path):
        _check_replaceable(target)
        temporary = _temporary_beside(target)
        open(temporary, "wb").close()
        os.unlink(temporary)


def read_json(path: str) -> Any:
    """Return the parsed file; raise ``ValueError``, which does not name ``path``, for what is no JSON in UTF-8."""
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """Yield the path of a temporary file that replaces ``path`` if the block ends without an error."""
    with replacing_all(os.fspath(path)) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(*paths: str) -> Iterator[list[str]]:
    """Yield a temporary path for each of ``paths``: all replace them if the block ends without an error, else none."""
    # A link stays one: what it points to is replaced.
    targets = [os.path.realpath(path) for path in paths]
    temporaries = [_temporary_beside(target) for target in targets]
    try:
        for temporary, target, path in zip(temporaries, targets, paths):
            with _errors_named(path):
                _check_replaceable(target)
                open(temporary, "wb").close()  # MXNet's writers do not say why a file cannot be opened
        with _errors_named(*paths):
            yield temporaries
        for temporary, path in zip(temporaries, paths):  # a disk may turn out to be full only now
            with _errors_named(path), open(temporary, "rb") as written:
                os.fsync(written.fileno())
        # All are on the disk by now. If the process dies during the renames, some files are new and some old.
        for temporary, target, path in zip(temporaries, targets, paths):
            with _errors_named(path):
                os.replace(temporary, target)
    finally:
        for temporary in filter(os.path.exists, temporaries):
            os.unlink(temporary)


def _check_replaceable(target: str) -> None:
    """Raise ``OSError`` if ``target`` is a folder, or a device or pipe such as ``/dev/null``, which must stay."""
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "a device or pipe cannot be replaced by a file")


def _temporary_beside(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.part")


@contextmanager
def _errors_named(*paths: str) -> Iterator[None]:
    """Let an ``OSError`` of the ``with`` block name ``paths``, not the temporary file, which the user does not know."""
    try:
        yield
    except OSError as error:
        other_file = error.filename is not None and not str(error.filename).endswith(".part")
        if error.errno is None or other_file:
            raise
        what = str(error.strerror)
        for folder in filter(None, map(os.path.dirname, paths)):
            if not os.path.isdir(folder):
                what += f" ({folder!r} is a file)" if os.path.exists(folder) else f" (make the folder {folder!r} first)"
                break
        raise OSError(error.errno, what, ", ".join(map(os.fspath, paths))) from error
