"""Trains each family again up to the first points of its stored curve, and says where they are others now.

A CPU gives the same figures again, so a run that begins as it did is not changed by what mxmp's code became since.
What begins otherwise wants `dev.py parity FAMILY --again`. A check that was ended goes on.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

from support.families import FAMILIES
from support.options import parse
from support.results import FOLDER, ROOT, SCRIPTS, in_parallel, read, tree, write

from parity.run import DTYPES, RESULTS, Job, load

BEGINNINGS = FOLDER / "beginnings.json"  # family -> dtype -> what was found
POINTS = 2  # of the 50 of a curve


def main(arguments: list[str] | None = None) -> int:
    args = parse(__doc__, arguments, jobs=(1, "runs at once; each has one core"), results=BEGINNINGS)
    known = read(args.results)
    jobs = [Job(family, dtype, 0) for family in FAMILIES for dtype in DTYPES[1:]]
    todo = [job for job in jobs if known.get(job.family, {}).get(job.dtype, {}).get("mxmp") != tree()]
    for job, found in in_parallel(begun, todo, args.jobs, "run"):
        known.setdefault(job.family, {})[job.dtype] = {"mxmp": tree(), **found}
        write(args.results, known, depth=2)
    others = [f"{name}: {found}" for name, found in all_of(known) if found["stored"] != found.get("now")]
    print("\n".join(others))
    print(f"{len(jobs) - len(others)} of {len(jobs)} runs begin as they did")
    return 1 if others else 0


def all_of(known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for family, dtypes in known.items():
        yield from ((f"{family}, {dtype}", found) for dtype, found in dtypes.items())


def begun(job: Job) -> dict[str, Any]:
    """Train for the steps of the first points; return the stored ones and those of now, or an error."""
    stored = load(RESULTS, job.family)[job.key]["curve"][:POINTS]
    path = os.pathsep.join([str(ROOT), *map(str, SCRIPTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    steps = ",".join(str(step) for step, _ in stored)
    command = [sys.executable, "-W", "ignore", "-m", "parity.beginning", steps, *job.command]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    if not found:
        return {"stored": stored, "error": (ended.stderr.strip().splitlines() or ["no output"])[-1]}
    return {"stored": stored, "now": json.loads(found[-1])}


def begin(steps: list[int], recipe: str, arguments: list[str]) -> None:
    """Run a recipe in this process until its losses reach the last of ``steps``; print the points of its curve."""
    sys.path.insert(0, str(Path(recipe).resolve().parent))
    import common

    class Beginning(common.Run):
        def keep(self, loss: float) -> None:
            super().keep(loss)
            if len(self.losses) == steps[-1]:
                bounds = zip([0, *steps], steps)
                print(json.dumps([common.point(self.losses, range(*each)) for each in bounds]), flush=True)
                raise SystemExit

    vars(common)["Run"] = Beginning
    sys.argv = [recipe, *arguments]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    begin([int(step) for step in sys.argv[1].split(",")], sys.argv[2], sys.argv[3:])
