"""Run a training script as a distributed job on this machine: scheduler, servers and workers.

    python scripts/dev.py launch --workers 2 -- python train.py --kvstore dist_sync

Uses the distributed KVStore (ps-lite) that MXNet's wheels contain, on 127.0.0.1. MXNet hangs when one
worker dies, so the launcher watches: the first process that fails, or the time limit, ends the job with
an error. ``--horovod`` starts the workers under Horovod instead, for ``kvstore="horovod"``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from support.options import parse

_ROLE_ONLY = [sys.executable, "-W", "ignore", "-c", "import mxnet"]


def main(arguments: list[str] | None = None) -> int:
    args = parse(
        *(__doc__, arguments, "command"),
        command=([str], "what every worker runs, after --"),
        workers=2,
        servers=1,
        timeout=(3600.0, "seconds for the whole job"),
        horovod=(False, "workers of Horovod (Gloo): no scheduler, no servers"),
    )
    if not args.command:
        sys.exit("error: what every worker runs is missing, as in: dev.py launch --workers 2 -- python train.py")
    if args.horovod:
        return launch_horovod(args.command, args.workers, args.timeout)
    return launch(args.command, args.workers, args.servers, args.timeout)


def launch(command: list[str], workers: int, servers: int = 1, timeout: float = 3600) -> int:
    """Return 0 if every worker exited with 0; else the first failure's code, or 124 on time-out."""
    address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(_free_port()), "DMLC_NODE_HOST": "127.0.0.1"}
    counts = {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers), "DMLC_INTERFACE": "lo"}
    base = {**os.environ, **address, **counts}
    roles = [("scheduler", _ROLE_ONLY)] + [("server", _ROLE_ONLY)] * servers + [("worker", command)] * workers
    jobs = [
        (role, subprocess.Popen(line, env={**base, "DMLC_ROLE": role}, start_new_session=True)) for role, line in roles
    ]
    try:
        return _watch(jobs, time.monotonic() + timeout)
    finally:
        for _, process in jobs:
            _end(process)


def launch_horovod(command: list[str], workers: int, timeout: float = 3600) -> int:
    """Do the same under Horovod, which ends the job itself when a worker fails."""
    runner = [sys.executable, "-W", "ignore", "-m", "horovod.runner.launch"]
    line = [*runner, "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", *command]
    job = subprocess.Popen(line, start_new_session=True)
    try:
        return _watch([("worker", job)], time.monotonic() + timeout)
    finally:
        _end(job)


def _watch(jobs: list[tuple[str, subprocess.Popen]], deadline: float) -> int:
    workers = [process for role, process in jobs if role == "worker"]
    while True:
        for role, process in jobs:
            if process.poll():
                print(f"launch_local: a {role} ended with code {process.returncode}; the job ends", file=sys.stderr)
                return process.returncode if process.returncode > 0 else 128 - process.returncode
        if all(process.poll() == 0 for process in workers):
            return 0
        if time.monotonic() > deadline:
            print("launch_local: the job ran past its time limit and was ended", file=sys.stderr)
            return 124
        time.sleep(0.05)


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(timeout=5 if process.poll() == 0 else 0.5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
