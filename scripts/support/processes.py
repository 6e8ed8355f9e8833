"""Processes that may crash or hang: how one ended is a result."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import warnings
from typing import Any, Callable


def prepare_processes(*modules: str) -> None:
    """Have the modules that every process needs imported once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*modules])
    share_path()  # Python before 3.13 does not: what the server cannot import each process would import anew


def share_path() -> None:
    """Let processes find what this one can import."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


def in_a_process(seconds: float, target: Callable[..., None], *args: Any) -> tuple[dict[str, Any], str]:
    """Return what ``target(pipe, *args)`` sent as pairs of name and value, and what ended its process, if anything."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    found: dict[str, Any] = {}
    ended = ""
    try:
        while here.poll(seconds):
            stage, value = here.recv()
            found[stage] = value
        ended = f"took longer than {seconds:.0f} s"
    except EOFError:
        process.join()
        code = process.exitcode or 0
        by = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        ended = f"the process ended {by}" if code else ""
    finally:
        process.kill()
        process.join()
    return found, ended


def silence() -> None:
    """Let this process write nothing, and run MXNet's graphs as they are: its own fusion is wrong in FP32 inference."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
