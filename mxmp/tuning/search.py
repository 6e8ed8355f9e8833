"""From profiles to a plan: learn, cut, learn what the cut's plan is like, and let whole steps decide."""

from __future__ import annotations

import statistics
import time
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx

from ..pipeline import emitted
from ..precision.casts import is_ours
from ..precision.graph import Entry, Node
from ..precision.tuned import Tuned
from .choices import Task, cast_bytes
from .clock import Arrays, Owner, Timed
from .cut import Costs, least
from .table import Table

__all__ = ["CONVERTED", "FULL", "Search", "faster", "quartiles", "without_waiting"]

FULL, CONVERTED, RULES, BYTES = "float32", "float32, converted", "rules", "fewest bytes cast"

CUT, CUT_AGAIN = "least time", "least time, cut again"

# Rounds of whole steps: at least, at most, and the seconds after which there are no more than the least.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 21, 60.0
# Profiles of one plan: at least and at most, and how many in a row must bring nothing new.
_PROFILES, _MOST_PROFILES, _QUIET = 4, 12, 2
_CUTS = 3


class Found(NamedTuple):
    """What a search ends with: the operators that compute low, why others do not, and how it was found."""

    low: frozenset[Node]
    reasons: dict[Node, str]
    tuned: Tuned


class Search:
    """The candidates of one task, timed on ``arrays``. ``tell`` is told, before each of its parts, what it is."""

    def __init__(
        self,
        task: Task,
        arrays: Arrays,
        shapes: Mapping[Entry, tuple[int, ...]],
        training: bool,
        table: Table,
        tell: Callable[[str], None],
    ) -> None:
        self._task, self._arrays, self._training = task, arrays, training
        self._table, self._tell = table, tell
        moved = cast_bytes(shapes)
        self._moved = Costs({}, {}, moved, moved)
        self._failed: list[str] = []
        self.candidates = {
            FULL: frozenset(),
            RULES: task.low_nodes(task.rules),
            BYTES: task.least_bytes(shapes),
        }

    def run(self) -> Found:
        """The plan whose whole steps are the fastest; FP32 unless that is beyond the spread of the rounds."""
        if not self.candidates[RULES] and not self._task.wide:
            return self._end(FULL, {}, ["nothing may compute low"])
        try:
            for low in (frozenset(), self._task.wide, self._task.narrow):
                self._learn(low)
            for _ in range(_CUTS):
                cut = least(self._task.choice, self._table.costs())
                if self.candidates.setdefault(CUT, cut) != cut:
                    self.candidates[CUT_AGAIN] = cut
                if self._table.knows(cut):
                    break
                self._learn(cut)
        except mx.MXNetError as error:
            self._failed.append(f"{self._task.policy.compute} fails here ({_first_line(error)})")
        times = self._whole_steps()
        return self._end(faster(times), times, self._failed)

    def _learn(self, low: frozenset[Node]) -> None:
        if self._table.knows(low):
            return
        self._tell(f"operators of a plan with {len(low)} of {len(self._task.wide)} low")
        timed = self._timed(low)
        whole = min(timed.step() for _ in range(_PROFILES))
        least_seconds: dict[Owner, float] = {}
        quiet = 0
        for number in range(_MOST_PROFILES):
            before = sum(least_seconds.values())
            for owner, seconds in timed.profile().items():
                # The least: another process can only add, and one operator is short enough to be left alone once.
                least_seconds[owner] = min(least_seconds.get(owner, seconds), seconds)
            quiet = quiet + 1 if before and sum(least_seconds.values()) > 0.98 * before else 0
            if number + 1 >= _PROFILES and quiet >= _QUIET:
                break
        self._table.learn(low, without_waiting(least_seconds, timed.operators, whole))

    def _timed(self, low: frozenset[Node]) -> Timed:
        return Timed(self._task.graph, self._task.plan(low, {}), self._arrays, self._training)

    def _whole_steps(self) -> dict[str, list[float]]:
        """Rounds of one step of each candidate."""
        self._tell("whole steps")
        bound: dict[str, Timed] = {FULL: Timed(self._task.graph, None, self._arrays, self._training)}
        if self._timed_differs():
            bound[CONVERTED] = self._timed(frozenset())
        met: dict[frozenset[Node], str] = {frozenset(): FULL}
        for name, low in self.candidates.items():
            if low in met:
                continue
            met[low] = name
            try:
                bound[name] = self._timed(low)
            except mx.MXNetError as error:
                self._failed.append(f"{name} fails here ({_first_line(error)})")
        times: dict[str, list[float]] = {name: [] for name in bound}
        start = time.perf_counter()
        while True:
            for name, timed in bound.items():
                times[name].append(timed.step())
            rounds = len(times[FULL])
            late = time.perf_counter() - start > _SECONDS
            if rounds >= (_ROUNDS if late or _is_steady(times) else _MOST_ROUNDS):
                return times

    def _timed_differs(self) -> bool:
        """Whether a converted graph is another even where nothing computes low."""
        plan = self._task.plan(frozenset(), {})
        graph, arrays = self._task.graph, self._arrays
        casted = emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs)
        return any(is_ours(node) for node in casted.graph.nodes())

    def _end(self, chosen: str, times: Mapping[str, Sequence[float]], notes: Iterable[str]) -> Found:
        low = self.candidates.get(chosen, frozenset())
        learnt = all(map(self._table.knows, (frozenset(), self._task.wide, self._task.narrow)))
        known = {name: nodes for name, nodes in self.candidates.items() if learnt and self._table.knows(nodes)}
        gains = {name: quartiles([a / b for a, b in zip(times[FULL], each)]) for name, each in times.items()}
        # What was profiled is the converted graph, in FP32 too.
        seconds = {name: self._table.predict(nodes) for name, nodes in known.items()}
        converted = gains.get(CONVERTED, (1.0, 1.0, 1.0))[1]
        tuned = Tuned(
            chosen,
            self._training,
            {name: statistics.median(each) for name, each in times.items()},
            gains,
            {
                name: converted * seconds[FULL] / each if name != FULL else 1.0
                for name, each in seconds.items()
                if each > 0
            },
            {name: int(self._task.choice.cost(nodes, self._moved)) for name, nodes in self.candidates.items()},
            (*notes, *self._verdict(chosen, times)),
        )
        failed = dict.fromkeys(self._task.wide - low, f"{self._task.policy.compute} could not be timed here")
        return Found(low, self._reasons(low) if learnt else failed, tuned)

    def _verdict(self, chosen: str, times: Mapping[str, Sequence[float]]) -> Iterable[str]:
        if times and chosen in (FULL, CONVERTED):
            yield f"FP32: no plan in {self._task.policy.compute} was faster beyond the spread of the rounds"

    def _reasons(self, low: frozenset[Node]) -> dict[Node, str]:
        """Why an operator that may compute low does not."""
        compute = self._task.policy.compute
        reasons = {}
        for node in self._task.wide - low:
            in_low, in_full = (1e3 * self._table.of_node(node, is_low) for is_low in (True, False))
            slower = f"slower in {compute} here ({in_low:.2f} ms, {in_full:.2f} in FP32)"
            reasons[node] = slower if in_low >= in_full else f"{compute} does not pay for the casts here"
        return reasons


def without_waiting(profile: Mapping[Owner, float], operators: Mapping[Owner, int], whole: float) -> dict[Owner, float]:
    """A profile without what waiting for every operator costs: so much for each that the sum is no more than a step.

    ``operators``: of how many each part is made. ``whole``: seconds of a step in which nobody waits.
    """
    left = dict(profile)
    for _ in range(8):  # a part gives no more than it has, then the others give the rest
        excess = sum(left.values()) - whole
        givers = sum(operators[owner] for owner, seconds in left.items() if seconds > 0)
        if excess <= 0.001 * whole or not givers:
            break
        each = excess / givers
        left = {owner: max(seconds - each * operators[owner], 0.0) for owner, seconds in left.items()}
    return left


def faster(times: Mapping[str, Sequence[float]]) -> str:
    """The name of the fastest by the median of its rounds, each against FP32 in the same round; FP32, as a converted
    net runs it, where that is not faster in three of four.
    """
    full = [name for name in (FULL, CONVERTED) if name in times]
    others = [name for name in times if name not in full]
    if not others:
        return full[-1]
    gains = {name: quartiles([a / b for a, b in zip(times[FULL], times[name])]) for name in times}
    own = max(full, key=lambda name: gains[name][1])
    best = max(others, key=lambda name: gains[name][1])
    low, _, _ = quartiles([a / b for a, b in zip(times[own], times[best])])
    return best if low > 1 else full[-1]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _is_steady(times: Mapping[str, Sequence[float]]) -> bool:
    for each in times.values():
        if len(each) < 2:
            return False
        low, middle, high = quartiles(each)
        if high - low > 0.04 * middle:
            return False
    return True


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if "rror" in line), str(error))[-120:]
