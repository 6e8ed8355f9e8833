"""A fresh Python beside the user's process, for kernels that may crash; and the bar that shows what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator

__all__ = ["code_of", "prepare_to_crash", "showing", "start_python"]


def code_of(module: str) -> str:
    """Return the code with which a fresh Python takes the import path from its arguments and runs a module's ``main``.

    ``-m`` would put the current folder before the user's import path: its modules might stand there for Python's own.
    """
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def start_python(code: str, hint: str = "", **options: Any) -> subprocess.Popen:
    """Start a Python with the user's environment and import path, and pipes to its stdin and from its stdout.

    It has a session of its own: Ctrl-C in a terminal goes to the user's process alone, which then ends this one.
    ``options`` are ``subprocess.Popen``'s. Raises ``RuntimeError``, with ``hint``, if no Python can be started.
    """
    if not sys.executable:
        raise RuntimeError(f"mxmp cannot start a Python to measure in: sys.executable is empty. {hint}".rstrip())
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *map(os.fspath, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def prepare_to_crash() -> None:
    """Let a crash be seen as one: MXNet's handler turns SIGSEGV into an exit status. Leave no core file."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextmanager
def showing(progress: bool, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Give a function that shows the name of each part of a search on a terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda text: None
        return

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's own thread would stay

    with Bar(total=total, disable=None, unit="part") as bar:

        def show(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield show
