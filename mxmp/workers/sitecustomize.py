"""Runs what a worker's Python was asked to run, and ends the process at once if that fails.

MXNet frees a KVStore when Python ends, and waits there until all workers do the same: one that has failed waits for
ever, and the launcher with it. So an error leaves every frame, and what is in it, alive until the end.

Python imports this file, as ``sitecustomize``, before a worker's program; it then starts Python again with this file as
the program and the worker's as its arguments. It is found by PYTHONPATH, so a shell's Python is a worker's too. The
programs that a worker starts do not find it any more.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import sys
import threading
import types
import zipfile
from contextlib import suppress
from os import _exit as end_now
from types import TracebackType
from typing import Any, NoReturn, Sequence

_AT_MOST = 2.0  # seconds for threads and exit handlers of a worker that has failed
_SCRIPT = "script"
# Global, for it must not be freed before the process ends: what the program has left, or its error with all frames.
_kept: list[Any] = []


def divided(words: Sequence[str]) -> tuple[list[str], str, list[str]] | None:
    """Return Python's own options, ``"-c"``, ``"-m"`` or ``"script"``, and what follows; None for another command."""
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            position += 2 if word == "--check-hash-based-pycs" else 1
            continue
        letters = word[1:]
        found = next((i for i, letter in enumerate(letters) if letter in "cmWX"), None)
        if found is not None and letters[found] in "cm":
            rest = [letters[found + 1 :]] if letters[found + 1 :] else []
            before = [*words[:position], *([f"-{letters[:found]}"] if found else [])]
            return before, f"-{letters[found]}", [*rest, *words[position + 1 :]]
        position += 2 if found == len(letters) - 1 else 1
    if position >= len(words) or words[position] == "-":
        return None
    return [word for word in words[:position] if word != "--"], _SCRIPT, list(words[position:])


def _start_again() -> None:
    """Replace this process by one that runs this file; do nothing if it is no Python of its own."""
    here = os.path.dirname(os.path.realpath(__file__))
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if os.path.realpath(folder) != here]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
    if not sys.executable or not os.path.samefile(sys.executable, "/proc/self/exe"):
        return
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    found = divided(words)
    if found:
        options, kind, rest = found
        words = [*options, __file__, kind, *rest]
    os.execv(sys.executable, [sys.executable, *words])


def _run(kind: str, arguments: list[str]) -> None:
    """Run a program as Python would, in a module ``__main__`` that lives as long as the process."""
    what = arguments[0]
    sys.argv[:] = arguments if kind == _SCRIPT else [kind, *arguments[1:]]
    is_source = os.path.isfile(what) and not what.endswith(".pyc") and not zipfile.is_zipfile(what)
    first = {"-c": "", "-m": os.getcwd(), _SCRIPT: os.path.dirname(os.path.realpath(what)) if is_source else None}[kind]
    if not getattr(sys.flags, "safe_path", False):  # this file's folder comes first
        sys.path[:1] = [] if first is None else [first]
    if kind == "-m":
        _kept.append(runpy.run_module(what, run_name="__main__", alter_sys=True))
    elif kind == "-c":
        _execute(what, "<string>")
    elif is_source:
        path = os.path.abspath(what) if sys.version_info >= (3, 9) else what
        with open(path, "rb") as file:
            _execute(file.read(), path, __file__=path)
    else:
        _kept.append(runpy.run_path(what, run_name="__main__"))


def _execute(source: str | bytes, path: str, **names: str) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(names)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _status(error: BaseException) -> int:
    """Report an error as Python would; return its exit status, 0 for ``sys.exit()``."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    error = error.with_traceback(_of_the_program(error.__traceback__))
    sys.excepthook(type(error), error, error.__traceback__)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _who() -> str:
    getenv = ctypes.CDLL(None).getenv  # ps-lite sets the variable behind Python's back
    getenv.restype = ctypes.c_char_p
    rank = getenv(b"DMLC_RANK")
    return (
        f"the worker of rank {rank.decode()} (process {os.getpid()})" if rank else f"a worker (process {os.getpid()})"
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()


def _end(status: int) -> NoReturn:
    """Run threads and exit handlers to their end, for a short time, then end the process without freeing anything."""
    timer = threading.Timer(_AT_MOST, end_now, [status])
    timer.daemon = True
    timer.start()
    sys.exit(status)


def main() -> None:
    ended: list[int] = []

    def end() -> None:
        if ended:
            _flush()
            end_now(ended[0])

    atexit.register(end)  # the first, so that it runs after all others
    kind, *arguments = sys.argv[1:]
    try:
        _run(kind, arguments)
    except BaseException as error:
        _kept.append(error)
        status = _status(error)
        if not status:
            raise
        what = f"ends with status {status}" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
        with suppress(OSError, ValueError, AttributeError):
            print(f"python -m mxmp launch: {_who()} {what}", file=sys.stderr)
        _flush()
        ended.append(status)
        _end(status)


if __name__ == "__main__":
    main()
elif __name__ == "sitecustomize":
    _start_again()
