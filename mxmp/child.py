"""A second Python process in which kernels may crash without ending the user's process, and a progress bar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator

__all__ = ["code_of", "prepare_to_crash", "showing", "start_python"]


def code_of(module: str) -> str:
    """Return Python code, for ``start_python``, that calls the function ``main`` of ``module``.

    ``module`` is a full name such as ``"mxmp.tuning.process"``. The code first takes ``sys.path`` from the command line
    arguments. (``python -m`` would put the current folder first in ``sys.path``, where a file of the user's could
    replace a standard module.)
    """
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def start_python(code: str, hint: str = "", **options: Any) -> subprocess.Popen:
    """Start a new Python process that runs ``code``, with pipes for its stdin and stdout, and return it at once.

    The process gets ``sys.path`` of this one as its arguments, and the environment variables unless ``options`` has
    ``env``. It is in a new session, so Ctrl-C in a terminal interrupts this process alone; the caller has to end the
    other.

    Parameters
    ----------
    code : str
        As ``code_of`` returns it.
    hint : str
        What the user can do instead, for the error message.
    options
        Further arguments for ``subprocess.Popen``, such as ``stderr`` or ``text``.

    Raises
    ------
    RuntimeError
        ``sys.executable`` is empty, so Python does not know which program to start.
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

    A process that ``start_python`` started calls it. Otherwise MXNet's handler of SIGSEGV would end the process with an
    ordinary exit status, and the parent could not tell a crash from an error.
    """
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextmanager
def showing(progress: bool, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar within a ``with`` block; gives the function to call with the name of each part that begins.

    The function advances the bar by one part. It does nothing if ``progress`` is False or tqdm is not installed, and
    shows nothing where stderr is no terminal. ``total`` is the number of parts, None if it is not known.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda text: None
        return

    class Bar(tqdm):
        """A bar without the thread that tqdm starts for its first bar and never ends."""

        monitor_interval = 0

    with Bar(total=total, disable=None, unit="part") as bar:

        def show(text: str) -> None:
            """Show ``text`` on the bar and advance it by one part."""
            bar.set_description(text)
            bar.update()

        yield show
