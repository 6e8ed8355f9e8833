"""Trains every family of networks in float32, float16 and bfloat16 with several seeds.

python scripts/parity.py --list                      # the families, and how far each is
python scripts/parity.py                             # all runs without a result yet; may be ended and started again
python scripts/parity.py resnet50 --seeds 0 1 2      # some of them
python scripts/parity.py --jobs 2                    # two runs at once, each with one core
python scripts/make_parity_page.py                   # docs/parity.md from the results in docs/parity/

Each run is a process of its own, the command that stands beside its result. On a CPU; float16 is emulated there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

from tqdm import tqdm

from parity.families import FAMILIES
from parity.verdict import Verdict, verdict

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = ROOT / "examples" / "recipes"
RESULTS = ROOT / "docs" / "parity"
DTYPES = ("float32", "float16", "bfloat16")
ABLATED = 3  # seeds of a run with a safeguard less, or a probe


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", help="default: all; --list names them")
    parser.add_argument("--list", action="store_true", help="show every family and how far it is, and run nothing")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="default: as many as the family's row says; twice that after a miss"
    )
    parser.add_argument("--only-ablations", action="store_true", help="the runs without a safeguard alone")
    parser.add_argument("--again", action="store_true", help="runs that have a result as well")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each has one core")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder; a JSON file a family")
    options = parser.parse_args(arguments)
    unknown = set(options.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if options.list:
        print("\n".join(listing(options.results)))
        return 0
    jobs = [job for family in options.families or FAMILIES for job in jobs_of(family, options)]
    jobs.sort(key=lambda job: job.seed)  # of a table that is not complete, no row is empty
    failed = []
    with ThreadPool(options.jobs) as pool, tqdm(total=len(jobs), unit="run") as progress:
        for job, found in pool.imap_unordered(run, jobs):
            progress.update()
            progress.set_description(f"{job.family} {job.key}")
            if isinstance(found, str):
                failed.append(job)
                tqdm.write(f"python {shlex.join(job.command)}: {found}", file=sys.stderr)
            else:
                save(options.results, job.family, {**load(options.results, job.family), job.key: found})
    return 1 if failed else 0


def jobs_of(family: str, options: argparse.Namespace) -> Iterator[Job]:
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
    """The results of a family by the runs' keys."""
    path = folder / f"{family}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(folder: Path, family: str, results: dict[str, Any]) -> None:
    """Whole or not at all, a line a run."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"{family}.new"
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
    whole.write_text("{\n" + lines + "\n}\n")
    os.replace(whole, folder / f"{family}.json")


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


if __name__ == "__main__":
    sys.exit(main())
