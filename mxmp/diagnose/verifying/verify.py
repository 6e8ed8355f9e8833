"""``verify``: run a ported training plain, through mxmp in FP32, and in low precision, and compare what they do."""

from __future__ import annotations

import os
from dataclasses import replace
from statistics import median
from typing import Any, Callable, NamedTuple, Sequence

from ...child import showing
from ..networks.frontends import check_positive
from .judging import LOW_TIMES, OWN, Course, Departure, course, departure, spread_apart
from .reasons import reasons
from .recording import Record
from .report import Verification, difference
from .running import Job, Runner, Script

_SEEDS = 8
_SEARCH = 11  # skips, from a loss scale of 65536 to 32
_APART = 2.5  # standard errors
_NOISE, _MORE_NOISE = (1, 2), (3, 4, 5, 6)  # runs; more where low precision leaves that of the first two
# A gradient that low precision changes by less than this is none to speak of.
_LEAST = 0.1
_LASTING = 3  # updates
_LEAST_MOVED = 0.3  # of the way of the weights
# The least that one rounding changes gradients by: half a unit of the last digit.
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# What mxmp logs of a port that is right, too.
_NO_NEWS = ("step ", "nan or inf is detected", "float16 is emulated", "this CPU has neither", "discarded non-finite")


def verify(
    run: Callable[[], Any] | str | os.PathLike,
    steps: int = 20,
    *,
    arguments: Sequence[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> Verification:
    """Say whether a ported training still does what it did in plain MXNet, and whether what is left is only rounding.

    Runs it several times for ``steps`` updates, each time in a process of its own, with the same random seeds and the
    same initial weights:

    - *plain*: each call of mxmp does what MXNet's would. ``convert`` leaves the net as it is, a Trainer is gluon's.
    - *graph*: all that mxmp does, with graphs, loss scale and checks, but every operator computes in FP32.
    - *low*: as written.
    - *noise*, twice: plain, with the initial weights rounded to the compute dtype, up or down at random.

    Further runs follow where the first leave a question: whether plain repeats itself, how a last digit of FP32 grows,
    what other random draws do. A step that low precision skips is left out of the plain run that it is compared with.
    A process ends at its last update, so that nothing behind it in the script is done.

    Parameters
    ----------
    run : callable, str or path
        A function without arguments that builds and trains, or the path of a script, which runs as by ``python``.
    steps : int
        How many updates of a trainer or module to compare. A script that ends earlier is compared as far as it goes.
    arguments : sequence of str
        What the script gets in ``sys.argv``.
    seed : int
        The seed of Python's, NumPy's and MXNet's random numbers.
    progress : bool
        Whether to show a progress bar, if tqdm is installed.

    Returns
    -------
    Verification
        ``right`` and ``verdict``; ``print`` shows them with likely reasons, ``plot_verification`` draws.

    Raises
    ------
    TypeError
        ``run`` is neither callable nor a path.
    ValueError
        ``steps`` is not positive, or ``arguments`` are given for a function.
    OSError
        There is no such script.
    """
    check_positive(steps=steps)
    called: Script | Callable[[], Any]
    if isinstance(run, (str, os.PathLike)):
        path = os.fspath(run)
        with open(path, "rb"):
            pass
        called = Script(path, list(arguments))
    elif callable(run):
        if arguments:
            raise ValueError("arguments are for a script; a function is called without any")
        called = run
    else:
        raise TypeError(f"verify takes a function that builds and trains, or a script, got {type(run).__name__}")
    with showing(progress, 6 * steps) as show:
        return _verified(Runner(called, steps, seed, show))


def _verified(runner: Runner) -> Verification:
    job = Job("plain")
    plain = runner.run(job)
    note = ""
    if plain.error:
        job = job._replace(imperative=True)
        failed, plain = plain.error, runner.run(job)
        note = f"plain MXNet was not hybridized, as it then fails with {failed}"
        if plain.error:
            return Verification(None, f"Cannot say: in plain MXNet it fails with {failed}")
    if not plain.updates:
        return Verification(None, "Cannot say: it makes no update by an mxmp.Trainer or mxmp.Module")
    if not plain.dtypes:
        return Verification(None, "Cannot say: nothing is converted. Call mxmp.convert(net), or train an mxmp.Module")
    if plain.ends_at:
        ends = f"from update {plain.ends_at} on, plain MXNet's own gradients are inf or NaN"
        return Verification(None, f"Cannot say: {ends}", steps=plain.updates)
    dtype = "bfloat16" if "bfloat16" in plain.dtypes else "float16"
    graph, low = runner.run(Job("graph")), runner.run(Job("low"))
    said = tuple(text for text in dict.fromkeys(low.said) if text not in plain.said and not text.startswith(_NO_NEWS))
    found: dict[str, Any] = {"steps": plain.updates, "dtype": dtype, "said": said, "written": tuple(low.outside)}
    early = departure(plain, graph) if graph.error else None
    if graph.error and (early is None or early.what == "updates"):
        return _ended(graph, "in FP32", found)
    compared = _compared(runner, job, plain, graph, note)
    plain, job, at, note = compared.plain, compared.job, compared.at, compared.note
    if at is not None and not compared.unknown:
        runs = {"plain": plain, "graph": graph, "low": low}
        found["courses"] = {name: course(plain, record) for name, record in runs.items()}
        verdict = (
            f"The port is not right: graph differs from plain from update {at.step} on, in FP32, so rounding is not "
            f"the cause: {difference(at, len(plain.steps))}" + (f", {note}" if note.startswith("without") else "")
        )
        return Verification(False, verdict, reasons(at), departure=at, **found)
    if low.error:
        return _ended(low, f"in {dtype}", found)
    found["courses"] = {name: course(plain, run) for name, run in (("plain", plain), ("graph", graph), ("low", low))}
    found["agreement"] = max(found["courses"]["graph"].compared, default=0.0)
    if compared.unknown:
        return Verification(None, compared.unknown, departure=at, **found)
    of_draws = compared.draws
    again = (Job("graph") if of_draws else job)._replace(dtype=dtype, skips=frozenset(low.skips))
    reference = runner.run(again) if low.skips else graph if of_draws else plain
    found["skipped"] = len(low.skips)
    judged = _judged(runner, again, reference, low, note, found)
    left = judged.low_departure
    if left is not None and of_draws and _alike_on_average(runner, job, Job("low"), left):
        return replace(
            judged, right=True, verdict=f"The port is right: {note}, of {dtype} too", low_departure=None, reasons=()
        )
    return judged


def _ended(record: Record, how: str, found: dict[str, Any]) -> Verification:
    made = f" after {_updates(record.updates)}" if record.updates else ""
    verdict = f"The port is not right: plain MXNet trains, and mxmp {how} ends{made} with {record.error}"
    return Verification(False, verdict, **found)


class _Compared(NamedTuple):
    """How graph compares with plain: ``at`` is where it differs, ``unknown`` why nothing can be said."""

    plain: Record
    job: Job  # of ``plain``
    at: Departure | None
    note: str = ""  # how they were compared, if not step by step
    unknown: str = ""
    draws: bool = False  # whether they draw other random numbers


def _compared(runner: Runner, job: Job, plain: Record, graph: Record, note: str) -> _Compared:
    at = departure(plain, graph)
    if at is None:
        return _Compared(plain, job, None, note)
    itself = departure(plain, runner.run(job))
    if itself is None or at.step < itself.step:
        noise = [runner.run(job._replace(noise=number)) for number in (1, 2)]
        at = departure(plain, graph, noise, loose=1e-5)
        if at is None:
            return _Compared(plain, job, None, note)
    if itself is not None and itself.step <= at.step:
        unknown = (
            f"Cannot say: two plain runs with the same seeds differ from update {itself.step} on. Seed all random "
            "numbers that the script draws, and read no clock"
        )
        return _Compared(plain, job, at, note, unknown)
    if not job.imperative:
        other = job._replace(imperative=True)
        imperative = runner.run(other)
        if not imperative.error and departure(imperative, graph, noise, loose=OWN) is None:
            note = f"plain MXNet was not hybridized, as its graph differs from its Python from update {at.step} on"
            return _Compared(imperative, other, None, note)
    if not graph.draws:
        return _Compared(plain, job, at, note)
    left = _left_without_dropout(runner, job)
    if left is not None:
        return _Compared(plain, job, left, "without dropout, whose masks differ")
    if _draws_alike(runner, job, plain, at):
        note = f"their random draws differ, so the mean gradients over {_SEEDS} seeds were compared"
        return _Compared(plain, job, None, note, draws=True)
    return _Compared(plain, job, at, note)


def _left_without_dropout(runner: Runner, job: Job) -> Departure | None:
    """Return where graph leaves plain if both drop nothing; None, too, where graphs draw by other operators."""
    job, other = job._replace(dropout=False), Job("graph", dropout=False)
    graph = runner.run(other)
    if graph.draws or graph.error:
        return None
    plain = runner.run(job)
    if plain.error or departure(plain, graph) is None:
        return None
    return departure(plain, graph, [runner.run(job._replace(noise=number)) for number in _NOISE], loose=1e-5)


def _draws_alike(runner: Runner, job: Job, plain: Record, at: Departure) -> bool:
    """Return whether other random draws change plain, too, by then, and over many of them graph is like plain."""
    other = departure(plain, runner.run(job._replace(draws=1000)))
    return other is not None and other.step <= at.step and _alike_on_average(runner, job, Job("graph"), at)


def _alike_on_average(runner: Runner, job: Job, other: Job, at: Departure) -> bool:
    """Return whether the mean gradients of two kinds of runs are alike at a step; not if most runs skip it."""
    sets = []
    for each in (job, other):
        records = [runner.run(each._replace(draws=1000 * k, steps=at.step)) for k in range(1, _SEEDS + 1)]
        there = [r for r in records if not r.error and len(r.steps) > at.owner and len(r.steps[at.owner]) >= at.step]
        sets.append([record for record in there if not record.steps[at.owner][at.step - 1].skipped])
    return min(map(len, sets)) > _SEEDS // 2 and spread_apart(sets[0], sets[1], at) <= _APART


def _updates(number: int) -> str:
    return f"{number} update{'s' * (number != 1)}"


def _judged(
    runner: Runner, again: Job, reference: Record, low: Record, note: str, found: dict[str, Any]
) -> Verification:
    """Judge ``low`` by ``reference``, the run of ``again``, and by runs of it that noise has moved."""
    noise = [runner.run(again._replace(noise=number)) for number in _NOISE]
    for record in (reference, *noise):
        if record.error:
            return Verification(None, f"Cannot say: another plain run fails with {record.error}", **found)
    away, bands = course(reference, low), [course(reference, each) for each in noise]
    left = _low_departure([away], bands)
    if left is not None or away.typical > LOW_TIMES * _typical(bands, found["dtype"]):
        # One rounding may flip a ReLU or a near tie, in few runs, for good.
        moved = [runner.run(Job("low", number, found["dtype"])) for number in _NOISE]
        bands += [course(reference, runner.run(again._replace(noise=number))) for number in _MORE_NOISE]
        left = _low_departure([away, *(course(reference, each) for each in moved if _is_beside(each, low))], bands)
    found["noise_ratio"] = away.typical / _typical(bands, found["dtype"])
    found["courses"].update({f"noise {number}": each for number, each in zip(_NOISE, bands)})
    found["courses"].update(low=away, reference=course(reference, reference))
    dtype, updates = found["dtype"], _updates(found["steps"])
    exact = "bit for bit" if found["agreement"] == 0 else f"to {found['agreement']:.0e}"
    agree = note if note.startswith("their") else f"plain and graph agree {exact}"
    beside = f". {note[0].upper()}{note[1:]}" if note and agree != note else ""
    times = f"{found['noise_ratio']:.1f} times the noise"
    skips = f"; it skipped {found['skipped']} steps, whose batches plain leaves out too" if found["skipped"] else ""
    if found["skipped"] >= low.updates and low.updates <= _SEARCH:
        why = f"{agree} over {updates}, and {dtype} skipped them all to find its loss scale: compare more steps"
        return Verification(None, f"Cannot say: {why}", **found)
    if found["skipped"] >= low.updates:
        verdict = f"The port is right, but {dtype} skipped all {low.updates} steps"
        return Verification(False, verdict, _OVERFLOWS, **found)
    if left is not None:
        verdict = (
            f"The port is right, but {dtype} is more than rounding: {agree} over {updates}, and {dtype} leaves the "
            f"noise {_where(left)} ({times} over all){skips}"
        )
        reasons_ = (_STORED,) * (left.what == "weights") + _TOO_LOW
        return Verification(False, verdict + beside, reasons_, low_departure=left, **found)
    verdict = f"The port is right. {agree} over {updates}; {dtype} differs by {times}{skips}"
    return Verification(True, verdict + beside, **found)


_OVERFLOWS = ("gradients overflow at every loss scale that was tried: see mxmp.diagnose.blame",)
_STORED = (
    "the script reads weights and writes them back, and what it reads is rounded where they are stored in float16: "
    "mxmp.master_weights(net) has them in FP32, and mxmp.set_master_weights sets them"
)
_TOO_LOW = ("an operator needs more digits: mxmp.diagnose.audit names it, with the exclude that cures it",)


def _typical(bands: Sequence[Course], dtype: str) -> float:
    return max(*(each.typical for each in bands), _UNIT[dtype])


def _is_beside(run: Record, low: Record) -> bool:
    """Return whether two runs have applied the same batches."""
    return not run.error and run.skips == low.skips


def _low_departure(runs: Sequence[Course], bands: Sequence[Course]) -> Departure | None:
    """Return where the first of ``runs`` leaves the noise for good, as all of them do: one flip may make one large."""
    limit = max(_LEAST, LOW_TIMES * max(max(each.compared, default=0.0) for each in bands))
    way = max(_LEAST_MOVED, LOW_TIMES * max(each.moved for each in bands))
    found = []
    for run in runs:
        left = _left_for_good(run.gradients, limit)
        if left is not None:
            found.append(Departure(0, left + 1, "gradients", size=run.gradients[left]))
        elif run.moved > way:
            found.append(Departure(0, len(run.gradients), "weights", size=run.moved))
        else:
            return None
    return found[0]


def _left_for_good(sizes: Sequence[float], limit: float) -> int | None:
    """Return the first update above the limit from which on most are, of some at least."""
    counted = [k for k, size in enumerate(sizes) if size > 0]
    for number, k in enumerate(counted):
        rest = [sizes[other] for other in counted[number:]]
        if sizes[k] > limit and len(rest) >= min(_LASTING, len(counted)) and median(rest) > limit:
            return k
    return None


def _where(left: Departure) -> str:
    if left.what == "gradients":
        return f"at update {left.step}, where its gradients differ by {left.size:.0%}"
    return f"with its weights: what they have moved by differs by {left.size:.0%}"
