"""A second Python process in which kernels may crash without ending the user's process, and a progress bar."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import IO, Any, Callable, Iterator


def code_of(module: str) -> str:
    """Return Python code for a ``Child`` that calls ``main`` of the module with this full name."""
    # ``python -m`` would put the current folder first, where a file of the user's could hide a standard module.
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


class ChildEndedError(Exception):
    """A child ended before it answered; the text is how: a signal's name, or ``"exit status 1"``."""


class Child:
    """A Python with this one's ``sys.path``, which runs ``code`` and is sent, and sends, pickled messages."""

    def __init__(self, code: str, hint: str = "", **options: Any) -> None:
        if not sys.executable:
            raise RuntimeError(f"mxmp cannot start a Python to measure in: sys.executable is empty. {hint}".rstrip())
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *map(os.fspath, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal does not reach it: ``end`` has to
            **options,
        )

    def send(self, message: Any) -> None:
        to_it: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        with suppress(BrokenPipeError):  # it has ended, as ``receive`` finds out
            pickle.dump(message, to_it)
            to_it.flush()

    def receive(self) -> Any:
        from_it: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        try:
            return pickle.load(from_it)
        except (EOFError, pickle.UnpicklingError):
            status = self.process.wait()
            raise ChildEndedError(signal.Signals(-status).name if status < 0 else f"exit status {status}") from None

    def end(self) -> None:
        self.process.kill()
        with suppress(OSError), self.process:  # closes its pipes, and waits
            pass


def to_parent() -> Callable[[Any], None]:
    """Prepare this process, a child, to crash; return what sends a message, as no other code may print to stdout."""
    messages, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)  # what other code prints goes to stderr
    # MXNet's handler would end the process with a status: the parent could not tell a crash from an error.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):  # no core files
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def send(message: Any) -> None:
        with lock:
            pickle.dump(message, messages)
            messages.flush()

    return send


def from_parent() -> Any:
    """Wait for a message; ``EOFError`` at the end."""
    return pickle.load(sys.stdin.buffer)


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
