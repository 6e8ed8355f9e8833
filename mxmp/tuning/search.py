"""The search for the fastest plan.

FP32, as much low precision as possible, and the matrix operators alone in it are timed operator by operator. A minimum
cut of the costs gives a new plan, which is timed too, for three cuts at most. Then whole steps are compared.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx

from ..host.callbacks import last_line
from ..pipeline import emitted
from ..precision.graph import Node
from ..precision.plan import Plan
from ..precision.tuned import CONVERTED, FULL, Tuned
from .choices import BYTES, RULES, task_of
from .clock import Cast, Owner, Timed, arrays_of, beats, gain, quartiles
from .cut import cheapest
from .job import Job
from .table import Table

CUT, CUT_AGAIN = "least time", "least time, cut again"

# The least and the most rounds of steps, and the seconds after which no round follows the least.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 21, 60.0
# The least and the most profiles of one plan, and how many in a row must lower the sum of times by less than 2 %.
_PROFILES, _MOST_PROFILES, _QUIET = 4, 12, 2
# The most cuts, each after the profile of the plan that the cut before it found.
_CUTS = 3

# A note and a warning: what ``tune`` times in float16 on a CPU.
EMULATED = "these are times of its emulation, and say nothing about a GPU, for which ctx=mx.gpu() makes a plan"
# Called with a kind and its value: "part" and a text; before it runs, "plan" and the names of what is low in it;
# before they run, "operators" and their names; "seconds" and all times so far, by the keys of ``Table``.
Tell = Callable[[str, Any], None]


def measured(job: Job, tell: Tell) -> Plan:
    """Return the plan with the fastest steps, measured in this process, which a kernel may crash."""
    return replace(PlanSearch(job, tell).run(), blocks=job.blocks)


class PlanSearch:
    """One search; ``candidates`` has, by the name that a printed plan shows, the operators in low precision."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._task, self._shapes = task, shapes = task_of(job, measured=True)
        self._training, self._tell = job.training, tell
        self._crashes = {crash.low: crash.how for crash in job.crashes}
        self._readers = task.graph.consumers()
        timed_as = "it computes in FP32, and was timed as a stand-in"
        self._notes = [f"only your process can run {each}: {timed_as}" for each in job.stand_ins]
        if job.training and job.optimizer != "sgd":
            self._notes.append(f"steps update the weights by {job.optimizer}")
        if job.policy.compute == "float16" and task.device == "cpu":
            self._notes.append(f"float16 is emulated on a CPU: {EMULATED}")
        rules = task.low_nodes(task.rules_plan)
        self.candidates = {FULL: frozenset(), RULES: rules, BYTES: task.least_bytes(shapes)}
        self._arrays = arrays_of(job, task.graph)
        self._rest_of_steps: list[float] = []
        self._table = Table(task, shapes, job.training, dict(job.seconds))

    def run(self) -> Plan:
        """Return the plan with the fastest steps, with all that was measured in ``Plan.tuned``."""
        if not self.candidates[RULES] and not self._task.may_be_low:
            self._notes.append("nothing may compute low")
            return self._end(FULL, {})
        try:
            for low in (frozenset(), self._task.may_be_low, self._task.matrix_operators):
                self._learn(low)
            for _ in range(_CUTS):
                cut = cheapest(self._task.choice, self._table.costs())
                if self.candidates.setdefault(CUT, cut) != cut:
                    self.candidates[CUT_AGAIN] = cut
                if self._table.knows(cut):
                    break
                self._learn(cut)
        except mx.MXNetError as error:  # the candidates so far are compared
            self._note_failure(self._task.policy.compute, error)
        times = self._compare_steps()
        return self._end(fastest(times), times)

    def _learn(self, low: frozenset[Node]) -> None:
        """Put the times of the plan of ``low`` into the table: of each operator and cast, the least of some runs."""
        if self._table.knows(low):
            return
        self._tell("part", f"operators of a plan with {len(low)} of {len(self._task.may_be_low)} low")
        timed = self._timed(low)
        step = min(timed.step() for _ in range(_PROFILES))
        least_seconds: dict[Owner, float] = {}
        quiet = 0
        for number in range(_MOST_PROFILES):
            before = sum(least_seconds.values())
            for owner, seconds in timed.profile().items():
                # Other processes only make an operator slower, so the least of some times is the undisturbed one.
                least_seconds[owner] = min(least_seconds.get(owner, seconds), seconds)
            quiet = quiet + 1 if before and sum(least_seconds.values()) > 0.98 * before else 0
            if number + 1 >= _PROFILES and quiet >= _QUIET:
                break
        self._table.learn(low, without_waiting(least_seconds, timed.operators, step))
        self._tell("seconds", self._table.seconds)

    def _timed(self, low: frozenset[Node]) -> Timed:
        """Return the plan of ``low``, bound; without any, ``CONVERTED``: FP32 with workarounds against slow kernels."""
        # Every graph in low precision has these workarounds, so the FP32 that it is compared with has them too.
        return self._bound(low, None if low else Tuned(CONVERTED, self._training))

    def _bound(self, low: frozenset[Node], tuned: Tuned | None = None) -> Timed:
        """Return a plan, bound, after a first step whose operators were announced one by one."""
        names = self._tell_plan(low)
        if names in self._crashes:  # an earlier process
            raise mx.MXNetError(f"crash: {self._crashes[names]}")
        plan = replace(self._task.plan(low, {}), tuned=tuned)
        return Timed(self._task.graph, plan, self._arrays, self._training, lambda owner: self._announce(owner, low))

    def _tell_plan(self, low: frozenset[Node]) -> frozenset[str]:
        """Tell the names of the operators in low precision, before a plan runs; return them."""
        names = frozenset(self._task.names[node] for node in low)
        self._tell("plan", names)
        return names

    def _announce(self, owner: Owner | None, low: frozenset[Node]) -> None:
        """Tell what runs next, in case it crashes; None is a whole step, which has no names."""
        if not isinstance(owner, Cast):
            nodes = [owner] if owner is not None else []
        elif owner.to_fp32:
            nodes = [owner.entry.node]
        else:
            nodes = [node for node, _ in self._readers.get(owner.entry, ()) if node in low]
        self._tell("operators", tuple(self._task.names[node] for node in nodes))

    def _compare_steps(self) -> dict[str, list[float]]:
        """Return the seconds of whole steps by candidate, one for each round; those that fail are left out."""
        self._tell("part", "steps")
        bound = {FULL: self._bound(frozenset())}
        others: dict[frozenset[Node], str] = {}
        if self._has_workarounds_against_slow_kernels():
            others[frozenset()] = CONVERTED
        for name, low in self.candidates.items():
            if low:
                others.setdefault(low, name)  # the same plan is timed once
        for low, name in others.items():
            try:
                bound[name] = self._timed(low)
            except mx.MXNetError as error:
                self._note_failure(name, error)
        times: dict[str, list[float]] = {name: [] for name in bound}
        start = time.perf_counter()
        while True:
            for name, timed in list(bound.items()):
                self._tell_plan(self.candidates.get(name, frozenset()))
                try:
                    times[name].append(timed.whole_step())
                except mx.MXNetError as error:
                    if name == FULL:
                        raise
                    self._note_failure(name, error)
                    del bound[name], times[name]
            self._rest_of_steps.append(bound[FULL].rest_of_step())
            rounds = len(times[FULL])
            late = time.perf_counter() - start > _SECONDS
            if rounds >= (_ROUNDS if late or _is_steady(times) else _MOST_ROUNDS):
                return times

    def _note_failure(self, what: str, error: Exception) -> None:
        self._notes.append(f"{what} fails here ({last_line(error)[-120:]})")

    def _has_workarounds_against_slow_kernels(self) -> bool:
        plan, arrays = self._task.plan(frozenset(), {}), self._arrays
        options: dict[str, Any] = {"grad_req": arrays.grad_req, "large_inputs": arrays.large_inputs}
        graphs = (emitted(self._task.graph, plan, **options, avoid_slow_kernels=avoid) for avoid in (True, False))
        with_them, without = (list(each.workarounds) for each in graphs)
        return with_them != without

    def _end(self, chosen: str, times: Mapping[str, Sequence[float]]) -> Plan:
        """Return a candidate's plan with all measurements; ``times`` is empty if no step was timed."""
        task, table, compute = self._task, self._table, self._task.policy.compute
        low = self.candidates.get(chosen, frozenset())
        if times and not low:
            self._notes.append(f"FP32: no plan in {compute} was faster beyond the spread of the rounds")
        learnt = all(map(table.knows, (frozenset(), task.may_be_low, task.matrix_operators)))
        seconds = {name: table.predict(e) for name, e in self.candidates.items() if learnt and table.knows(e)}
        gains = {name: gain(times, name, FULL) for name in times}
        # FP32 was profiled with the workarounds against slow kernels, and gains are relative to plain FP32.
        converted = gains.get(CONVERTED, (1.0, 1.0, 1.0))[1]
        rest = statistics.median(self._rest_of_steps) if times else 0.0
        expected = {
            name: converted * (seconds[FULL] + rest) / (each + rest) for name, each in seconds.items() if each > 0
        }
        if FULL in expected:
            expected[FULL] = 1.0
        reasons = {}
        for node in task.may_be_low - low:
            reasons[node] = f"{compute} could not be timed here"
            if learnt:
                in_low, in_full = (1e3 * table.seconds_of(node, is_low) for is_low in (True, False))
                slower = f"slower in {compute} here ({in_low:.2f} ms, {in_full:.2f} in FP32)"
                reasons[node] = slower if in_low >= in_full else f"{compute} does not pay for the casts here"
        tuned = Tuned(
            chosen,
            self._training,
            {name: statistics.median(each) for name, each in times.items()},
            gains,
            expected,
            {name: task.bytes_cast(task.plan(e, {}), self._shapes) for name, e in self.candidates.items()},
            tuple(self._notes),
        )
        return replace(task.plan(low, reasons), tuned=tuned)


def without_waiting(profile: Mapping[Owner, float], operators: Mapping[Owner, int], step: float) -> dict[Owner, float]:
    """Return a profile, less the waits after each operator, so that its sum is at most ``step``, within 0.1 %."""
    # A profile waits for the device after each operator that the bound graph runs, a step once at its end.
    left = dict(profile)
    for _ in range(8):  # where one would fall below 0, the others share the rest in the next pass
        excess = sum(left.values()) - step
        givers = sum(operators[owner] for owner, seconds in left.items() if seconds > 0)
        if excess <= 0.001 * step or not givers:
            break
        each = excess / givers
        left = {owner: max(seconds - each * operators[owner], 0.0) for owner, seconds in left.items()}
    return left


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the name of the candidate that wins the comparison of whole steps."""
    full = CONVERTED if CONVERTED in times and beats(times, CONVERTED, FULL) else FULL
    others = [name for name in times if name not in (FULL, CONVERTED)]
    best = max(others, key=lambda name: gain(times, name, FULL)[1], default=full)
    # Of plans that are as fast, the one with the fewest operators in FP32 needs the least memory.
    if RULES in times and beats(times, RULES, full) and not beats(times, best, RULES):
        return RULES
    return best if beats(times, best, full) else full


def _is_steady(times: Mapping[str, Sequence[float]]) -> bool:
    """Return True if the quartiles of each candidate differ by 4 % of its median at most; False after one round."""
    spreads = [quartiles(each) for each in times.values()]
    return len(times[FULL]) > 1 and all(high - low <= 0.04 * middle for low, middle, high in spreads)
