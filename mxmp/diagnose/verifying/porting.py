"""Whether a port does in FP32 what plain MXNet does: ``graph`` against ``plain``, or over several seeds."""

from __future__ import annotations

from typing import NamedTuple

from .judging import OWN, Departure, departure, spread_apart
from .recording import Record
from .running import Job, Runner

NOISE = (1, 2)  # runs from moved weights
_SEEDS = 8
_APART = 2.5  # standard errors
_MOVED = (
    "plain and graph were compared from initial weights that differ in the last digit: with the script's own they "
    "stand on two sides of a threshold, such as a ReLU's"
)


class Compared(NamedTuple):
    """How graph compares with plain: ``at`` is where it differs, ``unknown`` why nothing can be said."""

    plain: Record
    job: Job  # of ``plain``
    at: Departure | None
    note: str = ""  # how they were compared, if not step by step
    unknown: str = ""
    draws: bool = False  # whether they draw other random numbers
    faults: bool = False  # whether plain has faults of MXNet's own, which graph avoids
    moved: tuple[Record, Record] | None = None  # plain and graph from other weights, where these were compared


def compare(runner: Runner, job: Job, plain: Record, graph: Record, note: str) -> Compared:
    at = departure(plain, graph)
    if at is None:
        return Compared(plain, job, None, note)
    itself = departure(plain, runner.run(job))
    if itself is None or at.step < itself.step:
        noise = [runner.run(job._replace(noise=number)) for number in NOISE]
        at = departure(plain, graph, noise, loose=1e-5)
        if at is None:
            return Compared(plain, job, None, note)
        # A threshold, such as a ReLU's, between them is elsewhere from moved weights; a fault stays.
        moved = runner.run(Job("graph", noise=NOISE[0], onednn=job.onednn))
        if not moved.error and departure(noise[0], moved, [plain, *noise[1:]], loose=1e-5) is None:
            return Compared(plain, job, None, "; ".join(filter(None, (note, _MOVED))), moved=(noise[0], moved))
    if itself is not None and itself.step <= at.step:
        unknown = (
            f"two plain runs with the same seeds differ from update {itself.step} on. Seed all random "
            "numbers that the script draws, and read no clock"
        )
        return Compared(plain, job, at, note, unknown)
    other = job._replace(imperative=True)
    imperative = plain if job.imperative else runner.run(other)
    as_python = f"plain MXNet was not hybridized, as its graph differs from its Python from update {at.step} on"
    if other != job and not imperative.error and _agree(runner, other, imperative, graph):
        return Compared(imperative, other, None, as_python)
    if graph.faults:
        faulty = runner.run(Job("graph", onednn=job.onednn, without=tuple(graph.faults)))
        if not faulty.error and _agree(runner, job, plain, faulty):
            names = ", ".join(graph.faults)
            note = f"plain MXNet has a fault that mxmp works around ({names}), and without that graph agrees with it"
            return Compared(plain, job, None, note, faults=True)
    if not graph.draws:
        return Compared(plain, job, at, note)
    left = _left_without_dropout(runner, job)
    if left is not None and other != job and not imperative.error and _left_without_dropout(runner, other) is None:
        plain, job, left, note = imperative, other, None, as_python
    if left is not None:
        return Compared(plain, job, left, "without dropout, whose masks differ")
    if _draws_alike(runner, job, plain, at):
        first = f"{note}; " if note == as_python else ""
        note = f"{first}their random draws differ, so the mean gradients over {_SEEDS} seeds were compared"
        return Compared(plain, job, None, note, draws=True)
    return Compared(plain, job, at, note)


def _agree(runner: Runner, job: Job, plain: Record, graph: Record) -> bool:
    """Return whether graph is within the noise around ``plain``, the run of ``job``: other jobs draw other masks."""
    if departure(plain, graph) is None:
        return True
    noise = [runner.run(job._replace(noise=number)) for number in NOISE]
    return departure(plain, graph, noise, loose=OWN) is None


def _left_without_dropout(runner: Runner, job: Job) -> Departure | None:
    """Return where graph leaves plain if both drop nothing; None, too, where graphs draw by other operators."""
    job, other = job._replace(dropout=False), Job("graph", dropout=False, onednn=job.onednn)
    graph = runner.run(other)
    if graph.draws or graph.error:
        return None
    plain = runner.run(job)
    if plain.error or departure(plain, graph) is None:
        return None
    return departure(plain, graph, [runner.run(job._replace(noise=number)) for number in NOISE], loose=1e-5)


def _draws_alike(runner: Runner, job: Job, plain: Record, at: Departure) -> bool:
    """Return whether other random draws change plain, too, by then, and over many of them graph is like plain."""
    other = departure(plain, runner.run(job._replace(draws=1000)))
    return (
        other is not None
        and other.step <= at.step
        and alike_on_average(runner, job, Job("graph", onednn=job.onednn), at)
    )


def alike_on_average(runner: Runner, job: Job, other: Job, at: Departure) -> bool:
    """Return whether the mean gradients of two kinds of runs are alike at a step; not if most runs skip it."""
    sets = []
    for each in (job, other):
        records = [runner.run(each._replace(draws=1000 * k, steps=at.step)) for k in range(1, _SEEDS + 1)]
        there = [r for r in records if not r.error and len(r.steps) > at.owner and len(r.steps[at.owner]) >= at.step]
        sets.append([record for record in there if not record.steps[at.owner][at.step - 1].skipped])
    return min(map(len, sets)) > _SEEDS // 2 and spread_apart(sets[0], sets[1], at) <= _APART
