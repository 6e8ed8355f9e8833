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


# By their first bytes. MXNet's number of a list of arrays: kMXAPINDArrayListMagic, src/ndarray/ndarray.cc.
_BEGINNINGS = {
    b"SQLite format 3\0": "an SQLite database",
    b"\x93NUMPY": "an array of NumPy, as in a .npy file",
    b"\x12\x01\0\0\0\0\0\0": "parameters of MXNet",
    b"\x80": "a pickle, as in a file of optimizer states",
}
_KEYS = {"nodes": "a Symbol in JSON", "operators": "a precision plan, as Plan.save writes it"}


def kind_of(path: str, unless: str = "") -> str:
    """Return the end of a message, ``"it holds a Symbol in JSON"``; ``""`` if not known, or of the kind ``unless``."""
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


def near_name(path: str, ending: str = "") -> str:
    """Return the end of a message about a missing file, such as ``"; did you mean 'net-0010.params'?"``.
    Without a near name it lists files of the folder whose names have the ``ending`` of the kind, if there are any."""
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f"; there is no folder {folder!r}"
    near = get_close_matches(name, there, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {os.path.join(folder, near[0])!r}?"
    same = sorted(each for each in there if ending and each.endswith(ending))[:3]
    return f"; there is {' or '.join(repr(os.path.join(folder, each)) for each in same)}" if same else ""


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
    """Write a matplotlib ``Figure`` to ``path``, unless this is None, and return it; ``ValueError`` for its format."""
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
