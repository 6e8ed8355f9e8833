"""Compares the Records of runs: which one leaves the noise first, at which update, in which parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from statistics import median
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from .recording import Record, Sketch, Step

# What two orders of the same FP32 sums may differ by without a question, of a gradient's norm and of all gradients'.
OWN, ALL = 1e-4, 1e-6
# How many times the noise a difference may be: of FP32, and of low precision.
TIMES, LOW_TIMES = 20.0, 10.0


@dataclass(frozen=True)
class Departure:
    """Where a run first differs from the plain one by more than the noise.

    Attributes
    ----------
    owner, step : int
        The trainer or module, in the order of their first steps, and its update, from 1.
    what : {"losses", "outputs", "weights", "gradients", "updates"}
        What differs. ``"weights"``: before the update, though all gradients before it agree. ``"updates"``: how many
        there are.
    names : tuple of str
        The parameters that differ, the largest difference first.
    size : float
        The difference of all that ``what`` names, over its norm in the plain run.
    ratios : tuple of float
        By what the norm of each parameter's gradient or weight is multiplied, in the order of ``names``.
    """

    owner: int
    step: int
    what: str
    names: tuple[str, ...] = ()
    size: float = inf
    ratios: tuple[float, ...] = ()


def departure(plain: Record, other: Record, noise: Sequence[Record] = (), loose: float = OWN) -> Departure | None:
    """Return where ``other`` leaves the noise around ``plain``: ``TIMES`` what the ``noise`` runs differ by."""
    found = []
    for owner, steps in enumerate(plain.steps):
        if owner >= len(other.steps):
            found.append(Departure(owner, 1, "updates"))
            continue
        theirs = other.steps[owner]
        bands = [each.steps[owner] for each in noise if owner < len(each.steps)]
        for number, (a, b) in enumerate(zip(steps, theirs)):
            near = [band[number] for band in bands if number < len(band)]
            if bands and not near:
                break
            first = _in_step(owner, number, a, b, near, loose)
            if first is not None:
                found.append(first)
                break
        else:
            if len(steps) != len(theirs):
                found.append(Departure(owner, min(len(steps), len(theirs)) + 1, "updates"))
    if not found and len(other.steps) > len(plain.steps):
        found = [Departure(len(plain.steps), 1, "updates")]
    return min(found, key=lambda each: (each.step, each.owner), default=None)


def _in_step(owner: int, number: int, a: Step, b: Step, near: Sequence[Step], loose: float) -> Departure | None:
    for what in ("weights", "losses", "outputs", "gradients"):
        names, size, ratios = _differing(what, a, b, near, loose)
        if names:
            return Departure(owner, number + 1, what, names, size, ratios)
    return None


def _differing(
    what: str, a: Step, b: Step, near: Sequence[Step], loose: float
) -> tuple[tuple[str, ...], float, tuple[float, ...]]:
    ours, theirs = _sketches(a, what), _sketches(b, what)
    bands = [_sketches(each, what) for each in near]
    whole = sqrt(sum(each.norm**2 for each in ours.values()))
    found = {}
    for name, mine in ours.items():
        its = theirs.get(name)
        away = mine.distance(its) if its is not None else inf
        band = max((mine.distance(each[name]) for each in bands if name in each), default=0.0)
        if away > TIMES * band + loose * mine.norm + ALL * whole:
            found[name] = away
    found.update({name: inf for name, its in theirs.items() if name not in ours and its.norm > ALL * whole})
    names = tuple(sorted(found, key=found.__getitem__, reverse=True))
    size = sqrt(sum(min(each, 1e150) ** 2 for each in found.values())) / whole if whole else inf
    return names, size, tuple(_ratio(ours.get(name), theirs.get(name)) for name in names)


def _ratio(a: Sketch | None, b: Sketch | None) -> float:
    return 0.0 if b is None else inf if a is None or not a.norm else b.norm / a.norm


def _sketches(step: Step, what: str) -> Mapping[str, Sketch]:
    if what == "losses":
        return {f"loss {i + 1}": Sketch(abs(loss), np.array([loss])) for i, loss in enumerate(step.losses)}
    if what == "outputs":
        return {f"output {i + 1}": each for i, each in enumerate(step.outputs)}
    return getattr(step, what)


@dataclass(frozen=True)
class Course:
    """How far a run is from the plain one, update by update, over all trainers: what the picture shows."""

    losses: tuple[float, ...]  # the first trainer's that has any
    # The norm of the difference of all gradients, over that of the plain run's; nan for a skipped update.
    gradients: tuple[float, ...]
    # How far the ways apart are that the weights have gone up to after each update, over the plain run's way.
    moved: tuple[float, ...] = ()

    @property
    def typical(self) -> float:
        """Return the median of ``gradients``, without skipped updates."""
        return median(self.compared or [0.0])

    @property
    def compared(self) -> list[float]:
        """Return ``gradients`` of the updates that were not skipped."""
        return [each for each in self.gradients if not isnan(each)]


def course(plain: Record, other: Record) -> Course:
    losses = next(([sum(s.losses) for s in steps] for steps in other.steps if any(s.losses for s in steps)), [])
    updates = range(min(plain.updates, other.updates))
    moved = (_apart(_ways(plain, number), _ways(other, number)) for number in updates)
    return Course(tuple(losses), tuple(_distances(plain, other)), tuple(moved))


def _ways(record: Record, number: int) -> dict[tuple[int, str], np.ndarray]:
    """Return, by owner and name, what has been added to each weight that has a gradient, as the sums of a sketch, up to
    after an update."""
    found = {}
    for owner, (steps, ends) in enumerate(zip(record.steps, record.ends)):
        weights = steps[number + 1].weights if number + 1 < len(steps) else ends
        for name in {name for step in steps for name in step.gradients} if steps else ():
            first, last = steps[0].weights.get(name), weights.get(name)
            if first is not None and last is not None and first.sums.shape == last.sums.shape:
                found[owner, name] = last.sums - first.sums
    return found


def _apart(a: Mapping[tuple[int, str], np.ndarray], b: Mapping[tuple[int, str], np.ndarray]) -> float:
    """Return how far two ways are apart, over the first, of the trainer of which that is most."""
    found = [0.0]
    for owner in {owner for owner, _ in a}:
        both = [(a[key], b[key]) for key in a if key[0] == owner and key in b and a[key].shape == b[key].shape]
        whole = sqrt(sum(float((mine**2).sum()) for mine, _ in both))
        found.append(sqrt(sum(float(((mine - its) ** 2).sum()) for mine, its in both)) / whole if whole else 0.0)
    return max(found)


def _distances(plain: Record, other: Record) -> Iterable[float]:
    """Yield, of each update, how far the gradients are apart, of the trainer of which that is most: another's may be a
    thousand times larger."""
    for number in range(min(plain.updates, other.updates)):
        found = []
        for steps, theirs in zip(plain.steps, other.steps):
            if number < min(len(steps), len(theirs)) and not theirs[number].skipped:
                found.append(_distance(steps[number].gradients, theirs[number].gradients))
        yield max(found, default=nan)


def _distance(ours: Mapping[str, Sketch], theirs: Mapping[str, Sketch]) -> float:
    away = sum(
        min(mine.distance(theirs[name]) if name in theirs else mine.norm, 1e150) ** 2 for name, mine in ours.items()
    )
    whole = sum(mine.norm**2 for mine in ours.values())
    return sqrt(away / whole) if whole else inf if away else 0.0


def spread_apart(plain: Sequence[Record], other: Sequence[Record], at: Departure) -> float:
    """Return by how many standard errors the mean gradients of two sets of runs differ, at a step."""

    def rows(records: Sequence[Record]) -> np.ndarray:
        found = []
        for record in records:
            gradients = record.steps[at.owner][at.step - 1].gradients
            found.append(np.concatenate([gradients[name].sums for name in sorted(gradients)]))
        return np.stack(found)

    a, b = rows(plain), rows(other)
    apart = ((a.mean(0) - b.mean(0)) ** 2).sum()
    error = (a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b)).sum()
    return float(sqrt(apart / error)) if error else (inf if apart else 0.0)


def constant_factor(at: Departure) -> float | None:
    """Return the factor of all gradients that differ, if it is one number other than 0 and 1."""
    ratios: Sequence[Any] = at.ratios
    if not ratios or not all(0 < each < inf for each in ratios):
        return None
    is_one = max(ratios) / min(ratios) < 1.01 and abs(ratios[0] - 1) > 0.01
    # Gradients of which each has another direction too differ by more than their norms; 1.5: a sketch is rough.
    return ratios[0] if is_one and at.size <= 1.5 * abs(ratios[0] - 1) else None
