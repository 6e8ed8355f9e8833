"""A folder that looks like the current one, in which a run may write and whose files are removed with it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

from ._mxnet import before_files_are_written

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Of Python's audit events: which of their arguments are paths of entries that a folder gets or loses.
_ENTRIES = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}


def enter(folder: str, outside: list[str]) -> tuple[str, Callable[[Any], None]]:
    """Make a mirror of the current folder in ``folder`` the current one of this process, for good.
    Return its path, and what to call before a file is written that neither Python's ``open`` nor MXNet writes: it puts
    a copy in place of a link. Appends to ``outside`` what is written elsewhere."""
    inside, temporary = os.path.join(folder, "run"), os.path.join(folder, "tmp")
    os.mkdir(temporary)
    os.symlink(os.getcwd(), inside)
    _own(inside)
    os.chdir(inside)
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    sys.dont_write_bytecode = True
    busy = False

    def own_folder(name: Any) -> str:
        path = os.path.abspath(os.fsdecode(name))
        if path.startswith(inside + os.sep):
            for parent in reversed([path, *map(str, Path(path).parents)]):
                if parent.startswith(inside + os.sep) and os.path.islink(parent) and os.path.isdir(parent):
                    _own(parent)
        return path

    def keep(name: Any) -> None:
        path = os.path.join(own_folder(os.path.dirname(os.path.abspath(os.fsdecode(name)))), _last(name))
        if path.startswith(inside + os.sep) and os.path.islink(path):
            target = os.path.realpath(path)
            os.unlink(path)
            if os.path.isfile(target):
                shutil.copy(target, path)
        real = os.path.realpath(path)
        if not real.startswith((folder, "/dev/", "/proc/")) and real not in outside:
            outside.append(real)

    def audit(event: str, args: tuple) -> None:
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            if event == "open":
                if not isinstance(args[0], int) and isinstance(args[2], int) and args[2] & _WRITES:
                    keep(args[0])
            elif event == "os.truncate" and not isinstance(args[0], int):
                keep(args[0])
            elif event == "os.chdir" and not isinstance(args[0], int):
                own_folder(args[0])
            elif event == "shutil.rmtree":
                _own_all(own_folder(args[0]), inside)
            else:
                for position in _ENTRIES.get(event, ()):
                    own_folder(os.path.dirname(os.path.abspath(os.fsdecode(args[position]))))
        finally:
            busy = False

    sys.addaudithook(audit)
    before_files_are_written(keep)
    return inside, keep


def in_mirror(path: str, source: str, inside: str) -> str:
    """Return where a file of the former current folder, ``source``, is in the mirror; where any other file is."""
    path = os.path.normpath(os.path.join(source, path))
    relative = os.path.relpath(path, source)
    return path if relative.startswith(os.pardir) else str(Path(inside, relative))


def _last(name: Any) -> str:
    return os.path.basename(os.path.abspath(os.fsdecode(name)))


def _own(link: str) -> None:
    """Put a folder with links to all that is there in place of a link to a folder."""
    target = os.path.realpath(link)
    os.unlink(link)
    os.mkdir(link)
    for name in os.listdir(target):
        os.symlink(os.path.join(target, name), os.path.join(link, name))


def _own_all(path: str, inside: str) -> None:
    """Do the same with all folders in ``path``, which is to be removed as a whole."""
    if path.startswith(inside + os.sep) and os.path.isdir(path):
        for entry in list(os.scandir(path)):
            if entry.is_symlink() and entry.is_dir():
                _own(entry.path)
            if entry.is_dir(follow_symlinks=False):
                _own_all(entry.path, inside)
