"""The search for the fastest plan.

FP32, as much low precision as possible, and the matrix operators alone in it are timed operator by operator. A minimum
cut of the costs gives a new plan, which is timed too, for three cuts at most. Then whole steps are compared.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx

from ..callbacks import last_line
from ..kernels.fit import device_of
from ..kernels.padding import LargeInputs
from ..pipeline import emitted
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan
from ..precision.tuned import CONVERTED, FULL, Tuned
from .choices import Task, shapes_of, signature
from .clock import Arrays, Cast, Owner, Timed, beats, gain, quartiles
from .cut import cheapest
from .job import Crash, Job
from .stand_ins import replaced, with_stand_ins
from .table import Table

RULES, BYTES = "rules", "fewest bytes cast"
CUT, CUT_AGAIN = "least time", "least time, cut again"

# The least and the most rounds of steps, and the seconds after which no round follows the least.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 21, 60.0
# The least and the most profiles of one plan, and how many in a row must lower the sum of times by less than 2 %.
_PROFILES, _MOST_PROFILES, _QUIET = 4, 12, 2
# The most cuts, each after the profile of the plan that the cut before it found.
_CUTS = 3

# Called with a kind and its value: "part" and a text; before it runs, "plan" and the names of what is low in it;
# before they run, "operators" and their names; "seconds" and all times so far, by the keys of ``Table``.
Tell = Callable[[str, Any], None]


def measured(job: Job, tell: Tell) -> Plan:
    """Return the plan with the fastest steps, measured in this process, which a kernel may crash."""
    return replace(Search(job, tell).run(), blocks=job.blocks)


def fewest_bytes(job: Job) -> Plan:
    """Return the plan of ``tune(measure=False)``: all matrix operators low, casts that move the fewest bytes."""
    graph = job.graph()
    shapes = shapes_of(graph, job.inputs)
    task = _task(job, graph, slow_too=True)
    plans = {RULES: task.rules_plan, BYTES: task.plan(task.least_bytes(shapes), {})}
    amounts = {name: task.bytes_cast(plan, shapes) for name, plan in plans.items()}
    chosen = BYTES
    if amounts[RULES] < amounts[BYTES] and task.matrix_operators <= task.low_nodes(task.rules_plan):
        chosen = RULES  # a kernel of the device casts where the cut does not know it
    return replace(plans[chosen], tuned=Tuned(chosen, job.training, cast_bytes=amounts), blocks=job.blocks)


def _task(job: Job, graph: Graph, **options: Any) -> Task:
    return Task(
        graph,
        job.policy,
        device_of(job.ctx),
        parameters=job.parameters,
        learned=job.learned,
        keep_output_names=job.parameters is None,
        training_shapes=job.inputs if job.training else {},
        **options,
    )


def _crashing(graph: Graph, shapes: Mapping[Entry, tuple], crashes: Iterable[Crash]) -> dict[str, str]:
    """Return why operators stay in FP32, by name: they crashed in low precision, or an equal operator did."""
    names = graph.names()
    signatures = {name: signature(node, shapes) for node, name in names.items() if not node.is_variable}
    found = {signatures[name]: crash for crash in crashes for name in crash.operators if name in crash.low}
    left_out = {name: found[each] for name, each in signatures.items() if each in found}
    return {name: f"its low-precision kernel crashes here ({crash.how})" for name, crash in left_out.items()}


class Search:
    """One search; ``candidates`` has, by the name that a printed plan shows, the operators in low precision."""

    def __init__(self, job: Job, tell: Tell) -> None:
        graph = job.graph()
        shapes = shapes_of(graph, job.inputs)
        untimed = dict.fromkeys(replaced(graph), "only the user's process can run it, so that it could not be timed")
        self._task = task = _task(job, graph, left_out={**untimed, **_crashing(graph, shapes, job.crashes)})
        self._training, self._tell = job.training, tell
        self._table = Table(task, shapes, job.training, dict(job.seconds))
        # A converted block has another graph for large inputs; a cast Symbol has one for all.
        large = LargeInputs(with_stand_ins(graph), list(job.inputs), job.policy.compute)
        large_inputs = job.parameters is not None and bool(large) and large.at(list(job.inputs.values()))
        drawn = {name: shape for name, shape in job.inputs.items() if name not in job.values}
        self._arrays = Arrays(graph, job.ctx, job.grad_req, job.values, drawn, large_inputs)
        self._crashes = {crash.low: crash for crash in job.crashes}
        self._readers = graph.consumers()
        self._shapes = shapes
        timed_as = "it computes in FP32, and was timed as a stand-in"
        self._notes = [f"only your process can run {each}: {timed_as}" for each in job.stand_ins]
        self.candidates = {
            FULL: frozenset(),
            RULES: task.low_nodes(task.rules_plan),
            BYTES: task.least_bytes(shapes),
        }

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
            self._notes.append(f"{self._task.policy.compute} fails here ({last_line(error)[-120:]})")
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
        tuned = None if low else Tuned(CONVERTED, self._training)
        return self._bound(low, replace(self._task.plan(low, {}), tuned=tuned))

    def _bound(self, low: frozenset[Node], plan: Plan) -> Timed:
        """Return a plan, bound, after a first step whose operators were announced one by one."""
        names = self._tell_plan(low)
        if names in self._crashes:  # an earlier process
            raise mx.MXNetError(f"crash: {self._crashes[names].how}")
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
        bound = {FULL: self._bound(frozenset(), self._task.plan(frozenset(), {}))}
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
                self._notes.append(f"{name} fails here ({last_line(error)[-120:]})")
        times: dict[str, list[float]] = {name: [] for name in bound}
        start = time.perf_counter()
        while True:
            for name, timed in list(bound.items()):
                self._tell_plan(self.candidates.get(name, frozenset()))
                try:
                    times[name].append(timed.step())
                except mx.MXNetError as error:
                    if name == FULL:
                        raise
                    self._notes.append(f"{name} fails here ({last_line(error)[-120:]})")
                    del bound[name], times[name]
            rounds = len(times[FULL])
            late = time.perf_counter() - start > _SECONDS
            if rounds >= (_ROUNDS if late or _is_steady(times) else _MOST_ROUNDS):
                return times

    def _has_workarounds_against_slow_kernels(self) -> bool:
        plan, graph, arrays = self._task.plan(frozenset(), {}), self._task.graph, self._arrays
        with_and_without = [
            emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs, avoid_slow_kernels=avoid)
            for avoid in (True, False)
        ]
        return len({tuple(casted.workarounds) for casted in with_and_without}) > 1

    def _end(self, chosen: str, times: Mapping[str, Sequence[float]]) -> Plan:
        """Return a candidate's plan with all measurements; ``times`` is empty if no step was timed."""
        low = self.candidates.get(chosen, frozenset())
        compute = self._task.policy.compute
        if times and not low:
            self._notes.append(f"FP32: no plan in {compute} was faster beyond the spread of the rounds")
        learnt = all(map(self._table.knows, (frozenset(), self._task.may_be_low, self._task.matrix_operators)))
        gains = {name: gain(times, name, FULL) for name in times}
        # FP32 was profiled with the workarounds against slow kernels, and gains are relative to plain FP32.
        converted = gains.get(CONVERTED, (1.0, 1.0, 1.0))[1]
        seconds = {
            name: self._table.predict(nodes)
            for name, nodes in self.candidates.items()
            if learnt and self._table.knows(nodes)
        }
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
            {
                name: self._task.bytes_cast(self._task.plan(nodes, {}), self._shapes)
                for name, nodes in self.candidates.items()
            },
            tuple(self._notes),
        )
        failed = dict.fromkeys(self._task.may_be_low - low, f"{compute} could not be timed here")
        return replace(self._task.plan(low, self._reasons(low) if learnt else failed), tuned=tuned)

    def _reasons(self, low: frozenset[Node]) -> dict[Node, str]:
        """Return why each operator of ``may_be_low`` that is not in ``low`` stays in FP32."""
        compute = self._task.policy.compute
        reasons = {}
        for node in self._task.may_be_low - low:
            in_low, in_full = (1e3 * self._table.seconds_of(node, is_low) for is_low in (True, False))
            slower = f"slower in {compute} here ({in_low:.2f} ms, {in_full:.2f} in FP32)"
            reasons[node] = slower if in_low >= in_full else f"{compute} does not pay for the casts here"
        return reasons


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
