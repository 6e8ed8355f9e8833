"""Runs a training for some updates in a process of its own, forked from this one, and returns its Record."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from os import _exit
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ...kernels.fit import SWITCH
from .folder import enter as enter_folder
from .folder import in_mirror
from .modes import enter, seed_all
from .recording import Record, Recorder

_BITS = {"float16": 11, "bfloat16": 8, "float32": 22}  # of float32 a few units, as a sum in another order


class Job(NamedTuple):
    """One run: what mxmp's names mean in it, and what else differs from the first run."""

    mode: str = "plain"
    noise: int = 0  # which of several; 0: none
    dtype: str = "float32"  # whose rounding the noise is
    draws: int = 0  # added to MXNet's seed
    skips: frozenset[tuple[int, int]] = frozenset()  # left out, by owner and step
    steps: int = 0  # fewer than those of the others
    imperative: bool = False  # whether ``hybridize`` does nothing
    dropout: bool = True  # False: it drops nothing
    onednn: bool = True  # False: MXNet computes by its own kernels
    without: tuple[str, ...] = ()  # the workarounds for wrong kernels that mxmp leaves out


class Runner:
    """Runs one training in several ways, with the same seeds and the initial weights of the first run."""

    def __init__(self, run: Script | Callable[[], Any], steps: int, seed: int, show: Callable[[str], None]) -> None:
        self._run, self._steps, self._seed, self._show = run, steps, seed, show
        self._initial: Mapping[str, np.ndarray] = {}
        self._limit: float | None = None  # of a run, in seconds; from the first

    def run(self, job: Job) -> Record:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as log, tempfile.TemporaryDirectory() as folder:
            child = context.Process(target=self._in_child, args=(job, ours, theirs, log, os.path.realpath(folder)))
            child.start()
            theirs.close()
            try:
                record = self._receive(ours, job, began)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(child.pid or 0), signal.SIGKILL)  # the workers of its data loaders too
                child.kill()
                child.join()
                ours.close()
            if record is None:
                log.seek(0)
                last = log.read().strip().splitlines()[-1:]
                code = child.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"the status {code} of its process"
                record = Record(error=f"{how}{': ' + last[0] if last else ''}")
        if self._limit is None:
            self._initial = record.initial
            self._limit = 120 + 30 * (time.monotonic() - began)
        return record

    def _receive(self, pipe: Any, job: Job, began: float) -> Record | None:
        while True:
            left = None if self._limit is None else self._limit - (time.monotonic() - began)
            if not pipe.poll(left if left is None else max(left, 0)):
                return Record(error=f"the time limit of {self._limit:.0f} seconds, after which it was stopped")
            try:
                message = pipe.recv()
            except EOFError:
                return None
            if isinstance(message, Record):
                return message
            self._show(f"{job.mode}{' with noise' if job.noise else ''}")

    def _in_child(self, job: Job, ours: Any, pipe: Any, log: Any, folder: str) -> None:
        ours.close()  # so that a write ends this process once nobody reads
        os.setsid()
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(log.fileno(), number)
            setattr(sys, stream, log)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # MXNet's handler would end the process with a status

        def finish() -> None:
            log.flush()
            pipe.send(recorder.record)
            _exit(0)  # nothing of the script runs after the last step: it would save what was not trained

        recorder = Recorder(
            job.steps or self._steps,
            lambda step: pipe.send(step),
            finish,
            self._initial,
            job.skips,
            job.noise,
            _BITS[job.dtype],
            lambda number: mx.random.seed(number + job.draws),
            self._seed,
        )
        _listen(recorder.record.said)
        if not job.onednn:
            os.environ["MXNET_MKLDNN_ENABLED"] = "0"  # MXNet reads it before its first operator
        if job.without:
            os.environ[SWITCH] = ",".join(filter(None, (os.environ.get(SWITCH), *job.without)))
        here = os.getcwd()
        inside, before_writing = enter_folder(folder, recorder.record.outside)
        enter(job.mode, recorder, before_writing, imperative=job.imperative, dropout=job.dropout)
        seed_all(self._seed, mx.random.seed, job.draws)
        try:
            if isinstance(self._run, Script):
                self._run(lambda path: in_mirror(path, here, inside))
            else:
                self._run()
            mx.nd.waitall()
        except SystemExit as error:
            if error.code not in (None, 0):
                recorder.record.error = f"SystemExit({error.code!r})"
        except BaseException as error:
            traceback.print_exc(file=log)
            text = str(error).strip()
            if isinstance(error, mx.MXNetError):
                text = text.splitlines()[-1].replace("MXNetError: ", "", 1).rstrip(" :")
            recorder.record.error = f"{type(error).__name__}: {' '.join(text.split())}"
        finish()


class Script(NamedTuple):
    """A script and what it gets in ``sys.argv``."""

    path: str
    arguments: Sequence[str]

    def __call__(self, located: Callable[[str], str]) -> None:
        """Run it as ``python PATH ARGUMENTS`` would; ``located`` gives the path to run."""
        path = located(self.path)
        sys.argv = [path, *self.arguments]
        sys.path[0] = os.path.dirname(os.path.abspath(path))
        runpy.run_path(path, run_name="__main__")


def _listen(said: list[str]) -> None:
    """Append to ``said`` what is warned, and what mxmp logs."""

    def note(text: str) -> None:
        if text not in said:
            said.append(text)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.showwarning = lambda message, *rest, **kwargs: note(str(message))
    logging.getLogger("mxmp").addHandler(Handler(logging.WARNING))
