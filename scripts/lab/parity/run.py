"""Train every family of networks in float32, float16 and bfloat16 with several seeds.

Each run is a process of its own, the command that stands beside its result. On a CPU; float16 is emulated there.

`verdict.py` says when two dtypes train equally well, with margins that were stated before. Runs of one seed share
weights and data order, so differences are paired by seed. How many seeds a family has was chosen by the spread of the
differences, never by their mean.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Iterator, NamedTuple

from support.families import FAMILIES
from support.options import parse
from support.results import FOLDER, ROOT, in_parallel, read, write

from parity.verdict import METRICS, Verdict, verdict

RECIPES = ROOT / "examples" / "recipes"
RESULTS = FOLDER / "parity"
DTYPES = ("float32", "float16", "bfloat16")
ABLATED = 3  # seeds of a run with a safeguard less


class Job(NamedTuple):
    """One run: a family, a dtype, a seed, and the options that remove a safeguard."""

    family: str
    dtype: str
    seed: int
    ablation: str = ""

    @property
    def command(self) -> list[str]:
        """Return what follows ``python`` in the root of the repository."""
        recipe, *arguments = FAMILIES[self.family].recipe.split()
        more = ["--dtype", self.dtype, "--seed", str(self.seed), *self.ablation.split()]
        return [f"examples/recipes/{recipe}", *arguments, *more]

    @property
    def key(self) -> str:
        """Return the name of the run among the results of its family."""
        return " ".join([self.dtype, str(self.seed), *self.ablation.split()])


def main(arguments: list[str] | None = None) -> int:
    """Run what has no result yet, or list the verdicts; return 1 where a run failed."""
    options = parse(
        *(__doc__, arguments, "families"),
        families=([str], "default: all; --list names them"),
        list=(False, "show the verdicts on every family, and run nothing"),
        dtypes=(list(DTYPES), "", DTYPES),
        seeds=([int], "default: as many as the family's entry says"),
        again=(False, "runs that have a result as well"),
        jobs=(1, "runs at once; each has one core"),
        results=(RESULTS, "folder; a JSON file a family"),
    )
    unknown = set(options.families) - FAMILIES.keys()
    if unknown:
        print(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}", file=sys.stderr)
        raise SystemExit(2)
    if options.list:
        print("\n".join(listing(options.results)))
        return 0
    jobs = [job for family in options.families or FAMILIES for job in jobs_of(family, options)]
    jobs.sort(key=lambda job: job.seed)  # while the table is not complete, every family has some seeds
    failed = False
    for job, (_, found) in in_parallel(run, jobs, options.jobs, "run"):
        if isinstance(found, str):
            failed = True
            print(f"\npython {shlex.join(job.command)}: {found}", file=sys.stderr)
        else:
            save(options.results, job.family, {**load(options.results, job.family), job.key: found})
    return int(failed)


def jobs_of(family: str, options: Namespace) -> Iterator[Job]:
    """Yield the runs of a family that have no result yet."""
    entry = FAMILIES[family]
    known = {} if options.again else load(options.results, family)
    for seed in options.seeds if options.seeds is not None else range(entry.seeds):
        jobs = [Job(family, dtype, seed) for dtype in options.dtypes]
        if seed < ABLATED and "float16" in options.dtypes:
            jobs += [Job(family, "float16", seed, option) for option in entry.ablations]
        yield from (job for job in jobs if job.key not in known)


def run(job: Job) -> tuple[Job, dict[str, Any] | str]:
    """Train, and return the result or the last line of the error."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "result.json"
        command = [sys.executable, "-W", "ignore", *job.command, "--out", str(out)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # oneDNN shares sums out over its threads: with one, a run is the same wherever it runs.
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        error = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        if job.ablation and error.startswith("FloatingPointError: "):  # a result: this shows the safeguard's use
            return job, {"seed": job.seed, "value": None, "error": error}
        if ended.returncode or not out.exists():
            return job, error
        return job, json.loads(out.read_text())


def load(folder: Path, family: str) -> dict[str, Any]:
    """Return the results of a family by the runs' keys."""
    return read(folder / f"{family}.json")


def save(folder: Path, family: str, results: dict[str, Any]) -> None:
    """Write the results of a family, sorted by the runs' keys."""
    write(folder / f"{family}.json", dict(sorted(results.items())))


def values(results: dict[str, Any], dtype: str, ablation: str = "") -> dict[int, float]:
    """Return the metric by seed; NaN where the run diverged."""
    keys = {seed: Job("", dtype, seed, ablation).key for seed in sorted({run["seed"] for run in results.values()})}
    found = {seed: results[key]["value"] for seed, key in keys.items() if key in results}
    return {seed: math.nan if value is None else value for seed, value in found.items()}


def judged(results: dict[str, Any], dtype: str, ablation: str = "") -> Verdict | None:
    """Return the verdict on a dtype against FP32 by the runs of a family; None while they are too few."""
    base = values(results, "float32")
    metric = next((result["metric"] for result in results.values() if "metric" in result), None)
    return verdict(base, values(results, dtype, ablation), METRICS[metric]) if metric else None


def listing(folder: Path) -> Iterator[str]:
    """Yield a line for each family: its recipe, how many runs there are, and the verdicts."""
    for family, entry in FAMILIES.items():
        results = load(folder, family)
        runs = "/".join(str(len(values(results, dtype))) for dtype in DTYPES) + f" of {entry.seeds}"
        verdicts = {dtype: judged(results, dtype) for dtype in DTYPES[1:]}
        found = [f"{dtype} {verdict.text if verdict else 'not judged'}" for dtype, verdict in verdicts.items()]
        yield f"{family:21} {entry.recipe:25} {runs:14} {'; '.join(found)}"
