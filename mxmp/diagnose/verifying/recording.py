"""What a run of a training does at each update, in numbers that can be compared with another run's."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
from mxnet import autograd

_BINS = 64


class Sketch(NamedTuple):
    """An array in 64 numbers: sums over its elements with random signs, fixed by its size.
    The squared norm of the difference of two sketches is that of the arrays' on average, within 12 %, and exactly for
    up to 64 elements."""

    norm: float
    sums: np.ndarray

    def distance(self, other: Sketch) -> float:
        if self.sums.shape != other.sums.shape:
            return float("inf")
        differ = ~((self.sums == other.sums) | (np.isnan(self.sums) & np.isnan(other.sums)))
        with np.errstate(all="ignore"):
            found = float(np.linalg.norm(self.sums[differ] - other.sums[differ]))
        return float("inf") if np.isnan(found) else found


class Step(NamedTuple):
    """One update, or skipped update, of a trainer or module."""

    losses: tuple[float, ...]
    outputs: tuple[Sketch, ...]
    gradients: dict[str, Sketch]  # as the optimizer gets them, with ``rescale_grad``
    weights: dict[str, Sketch]  # before the update
    skipped: bool
    number: int = 0  # among the updates and what the script discards


@dataclass
class Record:
    """A whole run: the steps of each trainer or module, in the order of their first ones."""

    steps: list[list[Step]] = field(default_factory=list)
    ends: list[dict[str, Sketch]] = field(default_factory=list)  # the weights at the end
    initial: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)  # the compute dtypes that the script asks for
    draws: list[str] = field(default_factory=list)  # the operators of mxmp's graphs that draw random numbers
    faults: list[str] = field(default_factory=list)  # workarounds for kernels that are wrong in FP32, in mxmp's graphs
    said: list[str] = field(default_factory=list)  # warnings and what mxmp has logged
    outside: list[str] = field(default_factory=list)  # files that were written and stay
    error: str = ""
    casts: bool = False  # whether a cast of the script to low precision was left out
    is_ported: bool = False  # whether a trainer or module of mxmp makes updates
    has_others: bool = False  # whether a gluon.Trainer does so besides

    @property
    def updates(self) -> int:
        return max(map(len, self.steps), default=0)

    @property
    def ends_at(self) -> int:
        """Return the update from which on, to the end, gradients are not finite; 0 for none."""
        lost = [k for steps in self.steps for k in _lost(steps)]
        return min(lost, default=0)

    @property
    def skips(self) -> set[tuple[int, int]]:
        """Return owner and number of each skipped step."""
        return {(i, step.number) for i, steps in enumerate(self.steps) for step in steps if step.skipped}


def _lost(steps: Sequence[Step]) -> Iterable[int]:
    """Yield the update of one trainer from which on nothing is finite, if there is one."""
    lost = 0
    for step in reversed(steps):
        if np.isfinite([each.norm for each in step.gradients.values()]).all():
            break
        lost += 1
    if lost:
        yield len(steps) - lost + 1


class Recorder:
    """Fills a Record, and gives all runs the same initial weights; ``noise`` moves them (0: not)."""

    def __init__(
        self,
        count: int,
        at_step: Callable[[int], None],
        at_end: Callable[[], None],
        initial: Mapping[str, np.ndarray],
        skips: frozenset[tuple[int, int]] = frozenset(),
        noise: int = 0,
        bits: int = 11,
        reseed: Callable[[int], None] = lambda number: None,
        seed: int = 0,
    ) -> None:
        self.record = Record()
        self._count, self._at_step, self._at_end, self._skips = count, at_step, at_end, skips
        self._known, self._noise, self._bits = dict(initial), noise, bits
        self._reseed, self._seed, self._drawn = reseed, seed, 0
        self._drawn_in: dict[str, list[Any]] = {}  # by the name of a parameter, the modules that have drawn one
        self._owners: list[Any] = []  # in the order of their first steps
        self._ended: list[int] = []  # of each, how many steps it has applied, skipped or discarded
        self._losses: dict[int, list[Any]] = {}
        self._outputs: dict[int, tuple[Sketch, ...]] = {}
        self._signs: dict[int, np.ndarray] = {}

    def note_policy(self, policy: Any) -> None:
        if policy.compute not in self.record.dtypes:
            self.record.dtypes.append(policy.compute)

    def note_draws(self, operators: Iterable[str]) -> None:
        self.record.draws += [name for name in dict.fromkeys(operators) if name not in self.record.draws]

    def note_faults(self, workarounds: Iterable[str]) -> None:
        self.record.faults += [name for name in workarounds if name not in self.record.faults]

    def note_losses(self, owner: Any, losses: Sequence[Any]) -> None:
        self._losses.setdefault(id(owner), []).extend(losses)

    def note_outputs(self, owner: Any, outputs: Sequence[Any]) -> None:
        self._outputs[id(owner)] = tuple(self.sketch(output) for output in outputs)

    def before_step(
        self,
        owner: Any,
        gradients: Sequence[Any],
        factor: float,
        weights: Mapping[str, Any],
        *,
        skipped: bool = False,
        own: bool = True,
    ) -> None:
        number = self._number(owner)
        losses = tuple(float(_host(loss).astype(np.float64).mean()) for loss in self._losses.pop(id(owner), ()))
        found: dict[str, Sketch] = {}
        for name, array in gradients:
            if name not in found:  # the first device's
                found[name] = self.sketch(array, float(factor))
        self.record.is_ported |= own
        self.record.has_others |= not own
        outputs = self._outputs.pop(id(owner), ())
        step = Step(losses, outputs, found, self._all(weights), skipped, self._ended[number])
        self.record.steps[number].append(step)
        self._ended[number] += 1

    def after_step(self, owner: Any, weights: Callable[[], Mapping[str, Any]]) -> None:
        number = self._number(owner)
        self._at_step(self.record.updates)
        self.record.ends[number] = self._all(weights())
        if self.record.updates >= self._count:
            self._at_end()

    @contextmanager
    def discarding(
        self, owner: Any, gradients: Sequence[Any], weights: Callable[[], Mapping[str, Any]]
    ) -> Iterator[None]:
        found = [_host(array) for _, array in gradients]
        is_empty = not any(host.any() for host in found)
        skips = not is_empty and (not all(np.isfinite(host).all() for host in found) or self.leaves_out(owner))
        if skips:
            self.before_step(owner, (), 1.0, weights(), skipped=True)
        elif not is_empty:
            self._ended[self._number(owner)] += 1
        yield
        if skips:
            self.after_step(owner, weights)

    @property
    def has_begun(self) -> bool:
        return any(self.record.steps)

    def leaves_out(self, owner: Any) -> bool:
        number = self._place(owner)
        return (number, self._ended[number] if number < len(self._ended) else 0) in self._skips

    def initial_value(self, param: Any, drawn: bool) -> None:
        arrays = param.list_data()
        value = self.settled(param.name, arrays[0], drawn)
        if value is not arrays[0]:
            with autograd.pause():
                param.set_data(value)

    def settled(self, name: str, value: Any, drawn: bool, module: Any = None) -> Any:
        if self.has_begun and not drawn:
            return value
        host = new = _host(value)
        if drawn:
            # Two modules, such as a teacher and its student, may have parameters of the same names.
            modules = self._drawn_in.setdefault(name, [])
            at = next((i for i, each in enumerate(modules) if each is module), len(modules))
            modules += [module] if at == len(modules) else []
            key = f"{name} of module {at + 1}" if at else name
            known = self._known.get(key)
            if known is None:
                self._known[key] = self.record.initial[key] = host.copy()
            elif known.shape == host.shape:
                new = known
            self._drawn += 1
            self._reseed(self._seed + self._drawn)  # whatever the order in which the initializers have drawn
        if self._noise and host.dtype == np.float32:
            new = self._moved(name, new)
        if new is host or np.array_equal(new, host):
            return value
        return _like(value, new)

    def sketch(self, array: Any, factor: float = 1.0) -> Sketch:
        flat = _host(array).astype(np.float64).ravel() * factor
        signs = self._signs.get(flat.size)
        if signs is None:
            draws = np.random.RandomState(flat.size % 2**32).randint(0, 2, flat.size)
            signs = self._signs[flat.size] = (2 * draws - 1).astype(np.int8)
        with np.errstate(all="ignore"):
            flat = flat * signs
            norm = float(np.sqrt(np.dot(flat, flat)))
            whole = flat.size // _BINS * _BINS
            sums = flat[:whole].reshape(-1, _BINS).sum(0)
            sums[: flat.size - whole] += flat[whole:]
        return Sketch(norm, sums)

    def _place(self, owner: Any) -> int:
        """Return the number of an owner; before its first step, that which it would get now."""
        return next((k for k, known in enumerate(self._owners) if known is owner), len(self._owners))

    def _number(self, owner: Any) -> int:
        number = self._place(owner)
        if number == len(self._owners):
            self._owners.append(owner)
            self.record.steps.append([])
            self.record.ends.append({})
            self._ended.append(0)
        return number

    def _all(self, weights: Mapping[str, Any]) -> dict[str, Sketch]:
        return {name: self.sketch(array) for name, array in weights.items()}

    def _moved(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return ``value`` rounded to ``bits`` bits of mantissa, up or down at random."""
        drawn = np.random.RandomState((zlib.crc32(name.encode()) + 7919 * self._noise) % 2**32).uniform(
            size=value.shape
        )
        mantissa, exponent = np.frexp(value.astype(np.float64))
        moved = np.floor(mantissa * 2.0**self._bits + drawn) / 2.0**self._bits
        return np.ldexp(moved, exponent).astype(value.dtype)


def _host(array: Any) -> np.ndarray:
    return array.asnumpy()


def _like(value: Any, new: np.ndarray) -> Any:
    with autograd.pause():
        made = value.copy()
        made[:] = new
    return made
