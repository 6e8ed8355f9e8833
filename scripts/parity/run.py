"""Trains every family of networks in float32, float16 and bfloat16 with several seeds.

Each run is a process of its own, the command that stands beside its result. On a CPU; float16 is emulated there.

When two dtypes train equally well was stated before anything was trained: the means over seeds lie within the larger
of the family's tolerance (0.2 points where the metric has points) and two standard errors. Runs of one seed share
weights and data order, so differences are paired by seed.

Where the spread over seeds is wider than the tolerance, equals exceed two standard errors of five pairs by chance in
one of nine comparisons (Student's t with four degrees of freedom). So a family with a miss gets twice the seeds, once,
and the verdict on all of them stands.
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
from statistics import fmean, stdev
from typing import Any, Iterator, Mapping, NamedTuple

from support.options import parse
from support.results import DOCS, ROOT, in_parallel, read, write

from parity.families import FAMILIES

RECIPES = ROOT / "examples" / "recipes"
RESULTS = DOCS / "parity"
DTYPES = ("float32", "float16", "bfloat16")
ABLATED = 3  # seeds of a run with a safeguard less, or a probe


class Verdict(NamedTuple):
    """``difference``: mean of the low dtype less that of float32; ``bound``: how large it may be."""

    difference: float
    standard_error: float
    bound: float
    seeds: int

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.bound + 1e-9  # not so for NaN


def verdict(base: Mapping[int, float], low: Mapping[int, float], tolerance: float) -> Verdict | None:
    """By the seeds that both have; None with fewer than three. Not finite anywhere: it does not hold."""
    seeds = base.keys() & low.keys()
    if len(seeds) < 3:
        return None
    differences = [low[seed] - base[seed] for seed in seeds]
    if not all(map(math.isfinite, differences)):
        return Verdict(math.nan, math.nan, tolerance, len(seeds))
    error = stdev(differences) / math.sqrt(len(seeds))
    return Verdict(fmean(differences), error, max(tolerance, 2 * error), len(seeds))


class Job(NamedTuple):
    family: str
    dtype: str
    seed: int
    ablation: str = ""

    @property
    def command(self) -> list[str]:
        """From the root of the repository, after ``python``."""
        recipe, *arguments = FAMILIES[self.family].recipe.split()
        more = ["--dtype", self.dtype, "--seed", str(self.seed), *self.ablation.split()]
        return [f"examples/recipes/{recipe}", *arguments, *more]

    @property
    def recipe(self) -> Path:
        return RECIPES / FAMILIES[self.family].recipe.split()[0]

    @property
    def key(self) -> str:
        return " ".join([self.dtype, str(self.seed), *self.ablation.split()])


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        *(__doc__, arguments, "families"),
        families=([str], "default: all; --list names them"),
        list=(False, "show every family and how far it is, and run nothing"),
        dtypes=(list(DTYPES), "", DTYPES),
        seeds=([int], "default: as many as the family's row says; twice that after a miss"),
        only_ablations=(False, "the runs without a safeguard alone"),
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
    jobs.sort(key=lambda job: job.seed)  # of a table that is not complete, no row is empty
    failed = False
    for job, (_, found) in in_parallel(run, jobs, options.jobs, "run"):
        if isinstance(found, str):
            failed = True
            print(f"\npython {shlex.join(job.command)}: {found}", file=sys.stderr)
        else:
            save(options.results, job.family, {**load(options.results, job.family), job.key: found})
    return int(failed)


def jobs_of(family: str, options: Namespace) -> Iterator[Job]:
    """Of a family whose recipe exists: what has no result yet."""
    row = FAMILIES[family]
    if not Job(family, "", 0).recipe.exists():
        return
    results = load(options.results, family)
    known = {} if options.again else results
    for seed in options.seeds if options.seeds is not None else range(seeds_of(family, results)):
        usual = [] if options.only_ablations else [Job(family, dtype, seed) for dtype in options.dtypes]
        others = [*row.ablations, *(option for option, _ in row.probes)] if seed < ABLATED else []
        changed = [Job(family, "float16", seed, option) for option in others]
        yield from (job for job in usual + changed if job.key not in known)


def seeds_of(family: str, results: dict[str, Any]) -> int:
    """As many as the family's row says; twice as many after a miss with those."""
    seeds = FAMILIES[family].seeds
    first = {key: result for key, result in results.items() if result["seed"] < seeds}
    verdicts = [judged(family, first, dtype) for dtype in DTYPES[1:]]
    missed = any(found is not None and not found.holds for found in verdicts)
    return 2 * seeds if missed else seeds


def run(job: Job) -> tuple[Job, dict[str, Any] | str]:
    """Trains; returns the result, or the last line of the error."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "result.json"
        command = [sys.executable, "-W", "ignore", *job.command, "--out", str(out)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # oneDNN shares sums out over its threads: with one, a run is the same wherever it runs.
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        error = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        if job.ablation and error.startswith("FloatingPointError: "):  # what such a run is to show
            return job, {"seed": job.seed, "value": None, "error": error}
        if ended.returncode or not out.exists():
            return job, error
        return job, json.loads(out.read_text())


def load(folder: Path, family: str) -> dict[str, Any]:
    """Return the results of a family by the runs' keys."""
    return read(folder / f"{family}.json")


def save(folder: Path, family: str, results: dict[str, Any]) -> None:
    write(folder / f"{family}.json", dict(sorted(results.items())))


def values(results: dict[str, Any], dtype: str, ablation: str = "") -> dict[int, float]:
    """The metric by seed; NaN where the run diverged."""
    keys = {seed: Job("", dtype, seed, ablation).key for seed in sorted({run["seed"] for run in results.values()})}
    found = {seed: results[key]["value"] for seed, key in keys.items() if key in results}
    return {seed: math.nan if value is None else value for seed, value in found.items()}


def judged(family: str, results: dict[str, Any], dtype: str, ablation: str = "") -> Verdict | None:
    """The verdict on a dtype against float32; None before all seeds of the family's row are there.

    Runs without a safeguard are judged by ``ABLATED`` seeds.
    """
    low, base, row = values(results, dtype, ablation), values(results, "float32"), FAMILIES[family]
    found = verdict(base, low, row.tolerance)
    return found if found and found.seeds >= (ABLATED if ablation else row.seeds) else None


def listing(folder: Path) -> Iterator[str]:
    for family, row in FAMILIES.items():
        results = load(folder, family)
        runs = ", ".join(f"{len(values(results, dtype))} {dtype}" for dtype in DTYPES)
        recipe = "" if Job(family, "", 0).recipe.exists() else " (not there)"
        found = [f"{dtype} {shown(judged(family, results, dtype))}" for dtype in DTYPES[1:]]
        yield f"{family:26} {row.recipe + recipe:40} {runs:36} {', '.join(found)}"


def shown(found: Verdict | None) -> str:
    return "not judged" if found is None else "equal" if found.holds else "NOT EQUAL"
