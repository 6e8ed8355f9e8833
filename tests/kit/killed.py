"""A writer that is killed while it writes: at chosen sizes of its files, and at each of its steps. Nothing is timed."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

# Python's audit events of what changes a folder, before it happens.
STEPS = ("open", "os.rename", "os.remove")


def killed_everywhere(write: Callable[[], None], folder: Path, largest: int) -> Iterator[str]:
    """Run ``write`` again and again in processes of their own, each killed at another place; yields where.

    ``largest``: bytes of the largest file that it writes into ``folder``. At last it is not killed.
    """
    for size in (0, 1, largest // 4, largest // 2, 3 * largest // 4, largest - 1):
        signal_number = _signal_of(_run_to_size, write, size)
        assert signal_number == signal.SIGXFSZ, f"not killed at {size} of {largest} bytes: {signal_number}"
        yield f"killed at {size} of {largest} bytes"
    step = 0
    while (signal_number := _signal_of(_run_to_step, write, folder, step)) == signal.SIGKILL:
        yield f"killed at step {step}"
        step += 1
    assert signal_number == 0, f"at step {step} it ended by signal {signal_number}"
    assert step >= 3, "a temporary file is opened twice and takes its place"
    yield "not killed"


def _signal_of(run: Callable[..., None], *arguments: Any) -> int:
    """The signal that ended ``run(*arguments)`` in a process of its own, 0 where it came to its end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(60)  # a child that hangs is an error of the test
            run(*arguments)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed by itself"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _run_to_size(write: Callable[[], None], size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    write()


def _run_to_step(write: Callable[[], None], folder: Path, step: int) -> None:
    left = step

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in STEPS and str(arguments[0]).startswith(str(folder)):
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)
    write()
