"""A second Python process in which kernels may crash without ending the user's process, and a progress bar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator


def code_of(module: str) -> str:
    """Return Python code for ``start_python`` that calls ``main`` of the module with this full name."""
    # ``python -m`` would put the current folder first, where a file of the user's could hide a standard module.
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def start_python(code: str, hint: str = "", **options: Any) -> subprocess.Popen:
    """Start a Python that gets this ``sys.path`` as arguments, for ``code_of``, with pipes for stdin and stdout."""
    if not sys.executable:
        raise RuntimeError(f"mxmp cannot start a Python to measure in: sys.executable is empty. {hint}".rstrip())
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *map(os.fspath, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal does not reach it: the caller has to end it
        **options,
    )


def prepare_to_crash() -> None:
    """Let a segmentation fault end this process by the signal SIGSEGV, without a core file."""
    # MXNet's handler would end the process with a status: the parent could not tell a crash from an error.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextmanager
def showing(progress: bool, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of ``total`` parts (None: unknown); yield what to call, with a text, when a part begins."""
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda text: None
        return

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread, which tqdm starts with its first bar and leaves running

    # disable=None: no bar where stderr is no terminal.
    with Bar(total=total, disable=None, unit="part") as bar:

        def show(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield show
