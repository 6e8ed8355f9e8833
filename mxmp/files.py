"""Files that appear complete or not at all, pictures among them, and JSON files of unknown origin."""

from __future__ import annotations

import errno
import json
import os
import threading
import zipfile
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Iterator


def check_writable(path: str) -> None:
    """Raise ``OSError`` if ``path`` cannot be written: a folder or device, or in a missing or read-only folder.

    Long computations call it first, since they would otherwise fail only at their end, when they write their result.
    Creates an empty temporary file beside ``path`` and removes it; ``path`` itself is not touched.
    """
    target = os.path.realpath(path)
    with _errors_named(path):
        _check_replaceable(target)
        temporary = _temporary_beside(target)
        open(temporary, "wb").close()
        os.unlink(temporary)


def read_json(path: str) -> Any:
    """Return the parsed content of a JSON file.

    Raises ``OSError`` if it cannot be read, and ``ValueError``, which does not name ``path``, if it is not in UTF-8, is
    not JSON, or is nested deeper than Python's recursion limit.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


# By their first bytes. MXNet's number of a list of arrays: kMXAPINDArrayListMagic, src/ndarray/ndarray.cc.
_BEGINNINGS = {
    b"SQLite format 3\0": "an SQLite database",
    b"\x93NUMPY": "an array of NumPy, as in a .npy file",
    b"\x12\x01\0\0\0\0\0\0": "parameters of MXNet",
    b"\x80": "a pickle, as in a file of optimizer states",
}
_KEYS = {"nodes": "a Symbol in JSON", "operators": "a precision plan, as Plan.save writes it"}


def kind_of(path: str, unless: str = "") -> str:
    """Return what a file is by its content, such as ``"it holds a Symbol in JSON"``; ``""`` where that is not known.

    It is the end of an error message about a file of the wrong kind, so it is ``""`` for a file of the kind ``unless``.
    """
    if os.path.isdir(path):
        return "it is a folder"
    with open(path, "rb") as file:
        begin = file.read(1024)
    found = next((kind for first, kind in _BEGINNINGS.items() if begin.startswith(first)), "")
    if not begin:
        return "it is empty"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_states = {"tree.npy", "digest.npy"} <= set(archive.namelist())
        found = "optimizer states of mxmp" if is_states else "arrays of NumPy, as in a .npz file"
    elif not found:
        try:
            raw = read_json(path)
            keys = raw if isinstance(raw, dict) else ()
            found = next((kind for key, kind in _KEYS.items() if key in keys), "JSON of another kind")
        except UnicodeDecodeError:
            return ""
        except ValueError:
            found = "text that is no JSON"
    return "" if unless and found.startswith(unless) else f"it holds {found}"


def near_name(path: str) -> str:
    """Return a suggestion for the message about a file that is missing, ``"; did you mean 'net-0010.params'?"``."""
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f"; there is no folder {folder!r}"
    near = get_close_matches(name, there, n=1, cutoff=0.8)
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else ""


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """Yield the path of a temporary file to write; it is renamed to ``path`` when the block ends without an error.

    So ``path`` has either its old content or the whole new one, even if the process dies in between. After an error in
    the block the temporary file is removed. If ``path`` is a symbolic link, the file that it points to is replaced.
    Raises ``OSError``, which names ``path``, if it cannot be written.
    """
    with replacing_all(os.fspath(path)) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(*paths: str) -> Iterator[list[str]]:
    """Yield the path of a temporary file for each of ``paths``; all are renamed when the block ends without an error.

    No file is renamed before all have been written and flushed to the disk, so if the disk is full, or after an error
    in the block, all ``paths`` keep their old content. If the process dies during the renames, some may be new and some
    old. If a path is a symbolic link, the file that it points to is replaced. Raises ``OSError`` if a file cannot be
    written; if that happens in the block, the error names all ``paths``.
    """
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
        for temporary, target, path in zip(temporaries, targets, paths):
            with _errors_named(path):
                os.replace(temporary, target)
    finally:
        for temporary in filter(os.path.exists, temporaries):
            os.unlink(temporary)


def new_figure(width: float, height: float) -> Any:
    """Return a new matplotlib ``Figure`` of a size in inches, without a window; ``ImportError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def picture_format(path: str) -> str:
    """Return the format of the picture ``path`` by its name: ``"png"``, ``"svg"`` or ``"pdf"``; else ``ValueError``."""
    kind = os.path.splitext(path)[1][1:]
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"{os.fspath(path)!r} is no picture: expected a name that ends with .png, .svg or .pdf")
    return kind


def save_figure(figure: Any, path: str | None) -> Any:
    """Write a matplotlib ``Figure`` to the file ``path``, unless this is None, and return the figure.

    Raises ``ValueError`` for a path that does not end with .png, .svg or .pdf, and ``OSError`` if it cannot be written.
    """
    if path is not None:
        kind = picture_format(path)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=110)
    return figure


def _check_replaceable(target: str) -> None:
    """Raise ``OSError`` if ``target`` is a folder, or a device or pipe such as ``/dev/null``, which must stay."""
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "a device or pipe cannot be replaced by a file")


def _temporary_beside(target: str) -> str:
    """Return a path ``.NAME.PROCESS.THREAD.part`` in the folder of ``target``, with the ids of process and thread."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.part")


@contextmanager
def _errors_named(*paths: str) -> Iterator[None]:
    """Replace an ``OSError`` of the ``with`` block by one that names ``paths``, joined by commas, as its file.

    The error of a failed write names the temporary file (``*.part``), of which the user does not know, or no file. An
    error that names any other file, or has no error number, is raised unchanged.
    """
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
