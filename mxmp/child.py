"""A second Python process in which kernels may crash without ending the user's process, and a progress bar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator


def code_of(module: str) -> str:
    """Return a line of Python code, for ``start_python``, that imports ``module`` and calls its function ``main``.

    ``module`` is a full name such as ``"mxmp.tuning.process"``. The code first sets ``sys.path`` to the command line
    arguments, which ``start_python`` gives it. ``python -m module`` would put the current folder in front of
    ``sys.path`` instead, where a file of the user's could hide a standard module.
    """
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def start_python(code: str, hint: str = "", **options: Any) -> subprocess.Popen:
    """Start a new Python process that runs ``code``, with pipes for its stdin and stdout, and return it at once.

    The command line arguments of the new process, its ``sys.argv[1:]``, are the entries of this one's ``sys.path``. To
    import from there, ``code`` must copy them to its own ``sys.path``, as that of ``code_of`` does. The process runs in
    a session of its own, so Ctrl-C in a terminal does not reach it: the caller has to end it. ``options`` are further
    arguments of ``subprocess.Popen``, such as ``text=True``, without which the pipes carry bytes. Raises
    ``RuntimeError`` if Python does not know its executable; the error's text ends with ``hint``, a sentence on what the
    user can do instead.
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
    """Let a segmentation fault end this process by the signal SIGSEGV, without a core file.

    Otherwise MXNet's handler of SIGSEGV would end the process with an ordinary exit status, and the parent process
    could not tell a crash from an error.
    """
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextmanager
def showing(progress: bool, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a tqdm progress bar during a ``with`` block, for a computation in several parts.

    Yields a function that the caller calls when a part begins, with a text that the bar shows. Each call advances the
    bar by one, so the bar counts the part that has just begun: it shows 5 of 5 while the last of five parts runs.
    ``total`` is the number of parts, None if it is not known. There is no bar if ``progress`` is False, tqdm is not
    installed or stderr is no terminal; the function then shows nothing.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda text: None
        return

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread, which tqdm starts with its first bar and leaves running

    with Bar(total=total, disable=None, unit="part") as bar:

        def show(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield show
