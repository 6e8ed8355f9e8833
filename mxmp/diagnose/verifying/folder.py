"""A folder that looks like the current one, in which a run may write and whose files are removed with it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

from ...step._mxnet import before_files_are_written

# So many files and folders are shown one by one; folders that are deeper are links as a whole.
_ENTRIES = 5000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def mirror(source: str, folder: str) -> None:
    """Fill ``folder`` with links to the files of ``source``, in folders of its own."""
    left, waiting = _ENTRIES, [(source, folder)]
    while waiting:
        old, new = waiting.pop(0)
        with os.scandir(old) as entries:
            for entry in entries:
                path, left = os.path.join(new, entry.name), left - 1
                if left > 0 and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    os.mkdir(path)
                    waiting.append((entry.path, path))
                else:
                    os.symlink(os.path.abspath(entry.path), path)


def enter(folder: str, outside: list[str]) -> tuple[str, Callable[[Any], None]]:
    """Make a mirror of the current folder in ``folder`` the current one of this process, for good.
    Return its path, and what to call before a file is written that neither Python's ``open`` nor MXNet writes: it puts
    a copy in place of a link. Appends to ``outside`` what is written elsewhere."""
    source = os.getcwd()
    inside, temporary = os.path.join(folder, "run"), os.path.join(folder, "tmp")
    os.mkdir(inside)
    os.mkdir(temporary)
    mirror(source, inside)
    os.chdir(inside)
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    sys.dont_write_bytecode = True

    def keep(name: Any) -> None:
        path = os.path.abspath(os.fsdecode(name))
        if os.path.islink(path) and path.startswith(inside + os.sep):
            target = os.path.realpath(path)
            os.unlink(path)
            if os.path.isfile(target):
                shutil.copy(target, path)
        real = os.path.realpath(path)
        if not real.startswith((folder, "/dev/", "/proc/")) and real not in outside:
            outside.append(real)

    def audit(event: str, args: tuple) -> None:
        if event == "open" and not isinstance(args[0], int) and isinstance(args[2], int) and args[2] & _WRITES:
            keep(args[0])

    sys.addaudithook(audit)
    before_files_are_written(keep)
    return inside, keep


def in_mirror(path: str, source: str, inside: str) -> str:
    """Return where a file of the former current folder is in the mirror; the path itself for any other file."""
    relative = os.path.relpath(os.path.abspath(path), source)
    return path if relative.startswith(os.pardir) else str(Path(inside, relative))
