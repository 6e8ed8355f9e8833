"""Whether what low precision changes is within the noise of one rounding."""

from __future__ import annotations

from math import isnan
from statistics import median, median_low
from typing import Any, NamedTuple, Sequence

from ...step.scaler import SEARCH
from .judging import LOW_TIMES, Course, Departure, course
from .porting import NOISE
from .recording import Record
from .report import Verification, behind, updates_of
from .running import Job, Runner

_MORE_NOISE = (3, 4, 5, 6)  # runs, where low precision leaves the noise of the first
# A gradient that low precision changes by less than this is none to speak of.
_LEAST = 0.1
_LASTING = 3  # updates
_LEAST_MOVED = 0.3  # of the way of the weights
# The least that one rounding changes gradients by: half a unit of the last digit.
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def judge(
    runner: Runner, again: Job, reference: Record, written: Job, low: Record, note: str, found: dict[str, Any]
) -> Verification:
    """Judge ``low``, the run of ``written``, by ``reference``, that of ``again``, and by runs that noise has moved."""
    noise = [runner.run(again._replace(noise=number)) for number in NOISE]
    for record in (reference, *noise):
        if record.error:
            return Verification(None, f"Cannot say: another plain run fails with {record.error}", **found)
    runs, bands = [course(reference, low)], [course(reference, each) for each in noise]
    away = runs[0]
    judged = judged_by(runs, bands)
    if judged.left is not None or judged.none or away.typical > LOW_TIMES * _typical(bands, found["dtype"]):
        # One rounding may flip a ReLU or a near tie, in few runs, for good.
        moved = [runner.run(written._replace(noise=number, dtype=found["dtype"])) for number in NOISE]
        bands += [course(reference, runner.run(again._replace(noise=number))) for number in _MORE_NOISE]
        runs += [course(reference, each) for each in moved if _is_beside(each, low)]
        judged = judged_by(runs, bands)
    found["noise_ratio"] = away.typical / _typical(bands, found["dtype"])
    found["courses"].update({f"noise {number}": each for number, each in zip(NOISE, bands)})
    found["courses"].update(low=away, reference=course(reference, reference))
    dtype, updates = found["dtype"], updates_of(found["steps"])
    exact = "bit for bit" if found["agreement"] == 0 else f"to {found['agreement']:.0e}"
    agree = note if again.mode == "graph" else f"plain and graph agree {exact}"
    beside = behind(note) if agree != note else ""
    times = f"{found['noise_ratio']:.1f} times the noise"
    grown = "" if judged.wide is None else f", which at update {judged.wide + 1} is {judged.noise:.0%} of the gradients"
    skips = f"; it skipped {found['skipped']} steps, whose batches plain leaves out too" if found["skipped"] else ""
    lost = next((k for k, steps in enumerate(low.steps) if steps and all(step.skipped for step in steps)), None)
    if lost is not None:
        number = len(low.steps[lost])
        whose = f" of trainer {lost + 1}" if len(low.steps) > 1 else ""
        if number <= SEARCH:
            all_steps = f"all {number} steps{whose}" if whose else "them all"
            why = f"{agree} over {updates}, and {dtype} skipped {all_steps} to find its loss scale: compare more steps"
            return Verification(None, f"Cannot say: {why}", **found)
        verdict = f"The port is right, but {dtype} skipped all {number} steps{whose}"
        return Verification(False, verdict, _OVERFLOWS, **found)
    if judged.none:
        why = (
            f"{agree} over {updates}, but one rounding of the initial weights alone changes plain's own gradients by "
            f"{judged.noise:.0%} at once, and {dtype} by {judged.low:.0%}: none can say which of them are right"
        )
        reasons = (_LESS_NOISE,) * (dtype == "bfloat16") + _TOO_WIDE
        return Verification(None, f"Cannot say: {why}{beside}", reasons, **found)
    left = judged.left
    if left is not None:
        verdict = (
            f"The port is right, but {dtype} is more than rounding: {agree} over {updates}, and {dtype} leaves the "
            f"noise {_where(left)} ({times} over all){skips}"
        )
        reasons_ = (
            (_OTHERS,) * low.has_others + (_CASTS,) * reference.casts + (_STORED,) * (left.what == "weights") + _TOO_LOW
        )
        return Verification(False, verdict + beside, reasons_, low_departure=left, **found)
    far = found["noise_ratio"] > LOW_TIMES
    share = f", {away.typical:.0%} of the gradients, where {_LEAST:.0%} are an error" if far else ""
    verdict = f"The port is right. {agree} over {updates}; {dtype} differs by {times}{share}{grown}{skips}"
    return Verification(True, verdict + beside, **found)


_OVERFLOWS = ("gradients overflow at every loss scale that was tried: see mxmp.diagnose.blame",)
_OTHERS = (
    "a gluon.Trainer is left in the script, whose loss is not scaled: if its weights are a converted net's, make it an "
    "mxmp.Trainer, and its loss.backward() a trainer.backward(loss)"
)
_CASTS = (
    "the script casts to low precision itself, which plain leaves out: cast no ids or positions: above 2048 float16 "
    "has not all whole numbers"
)
_STORED = (
    "the script reads weights and writes them back, and what it reads is rounded where they are stored in float16: "
    "mxmp.master_weights(net) has them in FP32, and mxmp.set_master_weights sets them"
)
_LESS_NOISE = "bfloat16 has few digits: verify the port in float16, whose rounding error is eight times smaller"
_TOO_WIDE = (
    "large numbers that nearly cancel within the net, such as a year, a time or an identifier that goes into it as it "
    "is: subtract the mean and divide by the deviation",
    "a ReLU or another limit at which the first batch stands: verify it with another seed",
    "a deep net with BatchNorm and random weights, such as ResNet-50, whose first gradients any rounding changes: the "
    "port is right in FP32, and the losses of a whole run say whether low precision trains as well",
)
_TOO_LOW = ("an operator needs more digits: mxmp.diagnose.audit names it, with the exclude that cures it",)


def _typical(bands: Sequence[Course], dtype: str) -> float:
    return max(*(each.typical for each in bands), _UNIT[dtype])


def _is_beside(run: Record, low: Record) -> bool:
    """Return whether two runs have applied the same batches."""
    return not run.error and run.skips == low.skips


class Judged(NamedTuple):
    """What noise says of low precision, over the updates up to one at which it is too wide to say anything."""

    left: Departure | None  # where low precision leaves the noise
    wide: int | None = None  # the first update, from 0, that none can judge
    noise: float = 0.0  # what one rounding changes its gradients by
    low: float = 0.0  # what low precision does
    none: bool = False  # whether no update can be judged


def judged_by(runs: Sequence[Course], bands: Sequence[Course]) -> Judged:
    """Judge ``runs`` of low precision, of which the first is as written, by ``bands`` of noise."""
    updates = min(len(each.gradients) for each in (*runs, *bands))
    for number in range(updates):
        noise = median(_at(bands, number) or [0.0])
        low = max(_at(runs, number), default=0.0)
        # Within ten times a tenth of a gradient any other gradient is.
        if min(noise, low) * LOW_TIMES >= 1:
            counted = [each for each in runs[0].gradients[:number] if not isnan(each)]
            left = _departure_of(runs, bands, number) if counted else None
            return Judged(left, number, noise, low, not counted)
    return Judged(_departure_of(runs, bands, updates))


def _at(courses: Sequence[Course], number: int) -> list[float]:
    return [size for size in (each.gradients[number] for each in courses) if not isnan(size)]


def _departure_of(runs: Sequence[Course], bands: Sequence[Course], updates: int) -> Departure | None:
    """Return where the first of ``runs`` leaves the noise for good, as all of them do: one flip may make one large."""
    if not updates:
        return None
    largest = [max((size for size in each.gradients[:updates] if not isnan(size)), default=0.0) for each in bands]
    limit = min(max(_LEAST, LOW_TIMES * _all_but_one(largest)), 1.0)  # 1: nothing in common
    way = max(_LEAST_MOVED, LOW_TIMES * _all_but_one([each.moved[updates - 1] for each in bands]))
    found = []
    for run in runs:
        left = _left_for_good(run.gradients[:updates], limit)
        if left is not None:
            found.append(Departure(0, left + 1, "gradients", size=run.gradients[left]))
        elif run.moved[updates - 1] > way:
            found.append(Departure(0, updates, "weights", size=run.moved[updates - 1]))
        else:
            return None
    return found[0]


def _all_but_one(sizes: Sequence[float]) -> float:
    """Return the largest size without that of one run of several, which a flip may have made large."""
    return sorted(sizes)[-2] if len(sizes) > 2 else max(sizes)


def _left_for_good(sizes: Sequence[float], limit: float) -> int | None:
    """Return the first update above the limit from which on most are, of some at least."""
    counted = [k for k, size in enumerate(sizes) if size > 0]
    for number, k in enumerate(counted):
        rest = [sizes[other] for other in counted[number:]]
        if sizes[k] > limit and len(rest) >= min(_LASTING, len(counted)) and median_low(rest) > limit:
            return k
    return None


def _where(left: Departure) -> str:
    if left.what == "gradients":
        return f"at update {left.step}, where its gradients differ by {left.size:.0%}"
    return f"with its weights: what they have moved by differs by {left.size:.0%}"
