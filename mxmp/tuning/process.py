"""The process in which ``tune`` measures, from both sides.

Kernels may crash there, random numbers are drawn, and teams of threads start: none of that reaches the user's process.
The process is a fresh Python with the user's environment and import path, and runs in the state in which training
runs: with as many threads, and with the OpenMP team that copying a batch from NumPy starts.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any, Callable

import mxnet as mx
import numpy as np

from ..child import code_of, prepare_to_crash, start_python
from ..precision.plan import Plan
from .job import Crash, Job
from .search import measured

START = code_of("mxmp.tuning.process")

# Signals that come from outside, not from a kernel that crashes.
_ENDED = {"SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGXCPU"}
# Exceptions that are raised again in the user's process; any other becomes a ``RuntimeError``.
_ERRORS = (ValueError, ImportError, MemoryError, OSError, mx.MXNetError)
# From about this many elements on, MXNet copies an array from NumPy with a team of OpenMP threads.
_PARALLEL_COPY = 200_000


# -- The user's process -----------------------------------------------------------------------------


def measured_apart(job: Job, show: Callable[[str], None]) -> tuple[Plan, dict[str, float]]:
    """Measure a job in a process of its own; return the fastest plan and ``job.seconds``, with all new times.

    If the process crashes, in one operator or in a whole step, another one starts. In that one the operators whose
    low-precision kernels crashed compute in FP32, and the plan that ran is not run again. ``show`` is called with the
    name of each part of the search, such as ``"steps"``, when it begins. Blocks until the plan is found.

    Raises
    ------
    RuntimeError
        The process cannot start, FP32 itself crashes in it, or it was ended from outside, as Linux does where memory
        runs out.
    ValueError, ImportError, MemoryError, OSError, mxnet.MXNetError
        The search raised this in the process. If it raises any other exception there, ``RuntimeError`` is raised here,
        with the traceback as its text.
    """
    while True:
        process = start_python(START, hint="Use tune(measure=False)")
        try:
            found = _result(process, job, show)
        finally:
            process.kill()
            with suppress(OSError), process:  # closes its pipes, and waits
                pass
        if isinstance(found, Plan):
            return found, job.seconds
        job = replace(job, crashes=(*job.crashes, found))


def _result(process: subprocess.Popen, job: Job, show: Callable[[str], None]) -> Plan | Crash:
    """Send a job to the process that measures, and read its messages until it has found the plan or has ended.

    Return the plan, or a ``Crash`` if the process crashed while it ran a plan with operators in low precision. Until
    then, the times that it measures are added to ``job.seconds``, ``show`` is called with the name of each part of the
    search, and its warnings are issued here. Raises the exception that the process reports. Raises ``RuntimeError`` if
    the process ended before the first plan ran, crashed in FP32, or was ended by a signal from outside.
    """
    plan, operators = None, ()
    to_it: IO[bytes] = process.stdin  # type: ignore[assignment]
    from_it: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(BrokenPipeError):  # the process has ended, which the loop finds out
        pickle.dump(job, to_it)
        to_it.flush()
    while True:
        try:
            kind, value = pickle.load(from_it)
        except (EOFError, pickle.UnpicklingError):
            return _crash(process.wait(), plan, operators)
        if kind == "found":
            return value
        if kind == "failed":
            error, text = value
            raise error(text)
        if kind == "part":
            show(value)
        elif kind == "warning":
            text, category = value
            warnings.warn(text, category, stacklevel=4)
        elif kind == "seconds":
            job.seconds.update(value)
        elif kind == "plan":
            plan, operators = value, ()
        else:
            operators = value


def _crash(status: int, plan: frozenset[str] | None, operators: tuple[str, ...]) -> Crash:
    """Return how a measuring process crashed, so that the next one can leave out the operators or the plan that ran.

    ``status`` is what ``Popen.wait`` returned. ``plan`` and ``operators`` become ``low`` and ``operators`` of the
    ``Crash``; ``plan`` is None if the process ended before the first plan ran. Raises ``RuntimeError`` if ``plan`` is
    None or empty (FP32 crashed), or if a signal from outside ended the process (SIGKILL, SIGTERM, ...): another process
    would not help.
    """
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    if name in _ENDED:
        why = ": perhaps memory ran out; try a smaller batch" if name == "SIGKILL" else ""
        raise RuntimeError(f"the process in which tune measures was ended by {name}{why}")
    if plan is None:
        raise RuntimeError(f"the process in which tune measures ended before it measured anything: {name}")
    if not plan:
        at = f" at {', '.join(operators)}" if operators else ""
        raise RuntimeError(f"tune can measure nothing: FP32 itself crashes here{at} ({name})")
    return Crash(plan, operators, name)


# -- The process that measures ----------------------------------------------------------------------


def main() -> None:
    """Run the process that measures: read a pickled ``Job`` from stdin, and write pickled messages to stdout.

    A message is a tuple of its kind and its value, such as ``("part", "steps")``. The kinds "part", "plan", "operators"
    and "seconds" say how the search proceeds; ``search.measured`` describes them. The value of a "warning" is a text
    and a category. The last message is "found" with the Plan, or "failed" with the type and the text of an exception.
    If the user's process ends, this process ends too.
    """
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints goes to stderr
    prepare_to_crash()
    job: Job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(kind: str, value: Any) -> None:
        with lock:
            pickle.dump((kind, value), messages)
            messages.flush()

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)  # mxmp's own; the user's process has seen those of imports
        warnings.showwarning = lambda message, category, *_: tell("warning", (str(message), category))
        try:
            # A second team of OpenMP threads, as a training loop starts it when it copies a batch from NumPy. With more
            # threads than processors, libgomp lets waiting threads spin for a shorter time, which changes the times.
            mx.nd.array(np.zeros(_PARALLEL_COPY, "float32")).wait_to_read()
            with mx.util.np_shape(job.numpy[1]), mx.util.np_array(job.numpy[2]):
                tell("found", measured(job, tell))
        except Exception as error:
            known = next((each for each in _ERRORS if isinstance(error, each)), None)
            tell("failed", (known, str(error)) if known else (RuntimeError, traceback.format_exc()))


def _end_with_parent() -> None:
    """Wait until the user's process has closed its end of stdin, as when it ends; then kill this process.

    It runs in a thread, since the main thread may be in a kernel.
    """
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)
