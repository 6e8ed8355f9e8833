"""The search for the fastest plan: operators are timed, a minimum cut gives a plan, and whole steps are compared."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx

from ..kernels.fit import device_of
from ..kernels.padding import LargeInputs
from ..pipeline import emitted
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan
from ..precision.tuned import CONVERTED, FULL, Tuned
from .choices import Task, shapes_of, signature
from .clock import Arrays, Cast, Owner, Timed
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

# Called as the search proceeds, with the kind of an event and its value: see ``measured``.
Tell = Callable[[str, Any], None]


def measured(job: Job, tell: Tell) -> Plan:
    """Measure plans for a job in this process, which a kernel may crash; return the plan with the fastest steps.

    ``tell(kind, value)`` is called as the search proceeds. Kind and value are ``"part"`` and a text, when a part of the
    search begins; ``"plan"`` and the names of the operators that compute in low precision, before a plan runs;
    ``"operators"`` and the names of those that run next, before they do; ``"seconds"`` and the times of all operators
    and casts measured so far, by the keys of ``table.Table``. Raises ``ValueError`` if the inputs or the policy do not
    fit the network or an operator has no rule, ``mxnet.MXNetError`` if FP32 fails, ``ImportError`` without igraph.
    """
    return replace(Search(job, tell).run(), blocks=job.blocks)


def fewest_bytes(job: Job) -> Plan:
    """Return, for a job, the plan with all matrix operators in low precision whose casts move the fewest bytes.

    This is what ``tune(measure=False)`` returns; no operator runs. A matrix operator that the rules or the policy keep
    in FP32 stays in FP32. A cast moves the bytes that it reads and writes.
    """
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
    """Return the ``Task`` of ``job``, whose FP32 graph is ``graph``; ``options`` are further keywords of ``Task``."""
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
    """Return the names of operators that must stay in FP32 as their low-precision kernel crashed, with the reasons.

    Each of them crashed in low precision, or runs the same kernel on the same shapes as an operator that did.
    """
    names = graph.names()
    signatures = {name: signature(node, shapes) for node, name in names.items() if not node.is_variable}
    found = {signatures[name]: crash for crash in crashes for name in crash.operators if name in crash.low}
    left_out = {name: found[each] for name, each in signatures.items() if each in found}
    return {name: f"its low-precision kernel crashes here ({crash.how})" for name, crash in left_out.items()}


class Search:
    """One search for the fastest plan of a job; ``run`` does it, from measuring operators to comparing whole steps.

    The search first profiles three plans, which means that it times them operator by operator: FP32, as much low
    precision as possible, and the matrix operators alone in low precision. A minimum cut of the measured costs gives a
    new plan. This one is profiled too, and the cut repeated, until all times of the new plan are known; there are three
    cuts at most. Then whole steps are timed of all plans that may win, the candidates, and ``fastest`` says which wins.

    Attributes
    ----------
    candidates : dict of str to frozenset of Node
        The plans that may win: from the name that a printed plan shows (``"rules"``, ``"least time"``, ...) to the
        operators that compute in low precision under the plan.
    """

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
        """Measure, and return the plan whose steps are the fastest, with all that was measured in ``Plan.tuned``.

        Measures nothing, and returns FP32, if no operator may compute in low precision. If low precision raises
        ``MXNetError`` while operators are profiled, the steps of the candidates so far are compared. Raises
        ``mxnet.MXNetError`` if FP32 itself fails.
        """
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
        except mx.MXNetError as error:
            self._notes.append(f"{self._task.policy.compute} fails here ({_first_line(error)})")
        times = self._compare_steps()
        return self._end(fastest(times), times)

    def _learn(self, low: frozenset[Node]) -> None:
        """Time each operator and cast of the plan with the operators ``low`` in low precision.

        The times go into the ``Table``, from which the times of other plans are predicted. Does nothing if the table
        has all of these times already.

        The plan's step is run 4 to 12 times, operator by operator, and each operator and cast gets its least time. The
        runs end early when each of two in a row lowers the sum of the least times by less than 2 % of it. Waiting for
        the device after each operator is subtracted (``without_waiting``).
        """
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
        """Return the graph of the plan in which the operators ``low`` compute in low precision, ready for timing.

        If ``low`` is empty, this is the candidate ``CONVERTED``, FP32 with the workarounds against slow kernels, and
        not plain FP32: every graph with operators in low precision has these workarounds. Raises ``mxnet.MXNetError``
        if the plan cannot run, or if it crashed an earlier process.
        """
        tuned = None if low else Tuned(CONVERTED, self._training)
        return self._bound(low, replace(self._task.plan(low, {}), tuned=tuned))

    def _bound(self, low: frozenset[Node], plan: Plan) -> Timed:
        """Return the graph of ``plan``, in which the operators ``low`` compute in low precision, ready for timing.

        A first step has then run operator by operator, each of them announced (``_announce``), and a second one as a
        whole. Raises ``mxnet.MXNetError`` if the plan cannot run, or if it crashed an earlier process.
        """
        names = self._tell_plan(low)
        if names in self._crashes:
            raise mx.MXNetError(f"crash: {self._crashes[names].how}")
        return Timed(self._task.graph, plan, self._arrays, self._training, lambda owner: self._announce(owner, low))

    def _tell_plan(self, low: frozenset[Node]) -> frozenset[str]:
        """Tell the user's process the names of the operators ``low`` of the plan that runs next; return these names."""
        names = frozenset(self._task.names[node] for node in low)
        self._tell("plan", names)
        return names

    def _announce(self, owner: Owner | None, low: frozenset[Node]) -> None:
        """Tell the user's process what runs next, in case it crashes: ``owner``, or a whole step if ``owner`` is None.

        For a cast to FP32, the operator that returns the tensor is named; for a cast to low precision, the operators
        that read the tensor and are in ``low``, the operators in low precision under the plan that runs.
        """
        if not isinstance(owner, Cast):
            nodes = [owner] if owner is not None else []
        elif owner.to_fp32:
            nodes = [owner.entry.node]
        else:
            nodes = [node for node, _ in self._readers.get(owner.entry, ()) if node in low]
        self._tell("operators", tuple(self._task.names[node] for node in nodes))

    def _compare_steps(self) -> dict[str, list[float]]:
        """Time whole steps of all candidates; return the seconds of each step by the candidate's name.

        Two of the names stand for FP32: ``FULL`` for the graph without workarounds against slow kernels, ``CONVERTED``
        for the graph with them, if it needs any. In each of 7 to 21 rounds every candidate runs one step, and entry
        ``i`` of each list is of round ``i``. Of candidates that are the same plan, only the first is timed. A candidate
        that raises ``mxnet.MXNetError``, before the rounds or in one, or crashed an earlier process, is left out, with
        a note in the plan. An ``mxnet.MXNetError`` of ``FULL`` is raised.
        """
        self._tell("part", "steps")
        bound = {FULL: self._bound(frozenset(), self._task.plan(frozenset(), {}))}
        others: dict[frozenset[Node], str] = {}
        if self._has_workarounds_against_slow_kernels():
            others[frozenset()] = CONVERTED
        for name, low in self.candidates.items():
            if low:
                others.setdefault(low, name)
        for low, name in others.items():
            try:
                bound[name] = self._timed(low)
            except mx.MXNetError as error:
                self._notes.append(f"{name} fails here ({_first_line(error)})")
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
                    self._notes.append(f"{name} fails here ({_first_line(error)})")
                    del bound[name], times[name]
            rounds = len(times[FULL])
            late = time.perf_counter() - start > _SECONDS
            if rounds >= (_ROUNDS if late or _is_steady(times) else _MOST_ROUNDS):
                return times

    def _has_workarounds_against_slow_kernels(self) -> bool:
        """Return True if FP32 with the workarounds against slow kernels is another graph than FP32 without them."""
        plan, graph, arrays = self._task.plan(frozenset(), {}), self._task.graph, self._arrays
        with_and_without = [
            emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs, avoid_slow_kernels=avoid)
            for avoid in (True, False)
        ]
        return len({tuple(casted.workarounds) for casted in with_and_without}) > 1

    def _end(self, chosen: str, times: Mapping[str, Sequence[float]]) -> Plan:
        """Return the plan of the candidate named ``chosen``, with all measurements in the plan's ``tuned``.

        ``times`` has the seconds of the timed steps by the candidate's name; it is empty if no step was timed.
        """
        low = self.candidates.get(chosen, frozenset())
        compute = self._task.policy.compute
        if times and not low:
            self._notes.append(f"FP32: no plan in {compute} was faster beyond the spread of the rounds")
        learnt = all(map(self._table.knows, (frozenset(), self._task.may_be_low, self._task.matrix_operators)))
        gains = {name: _gain(times, name, FULL) for name in times}
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
        """Return a text for each operator of ``may_be_low`` that is not in ``low``: why it stays in FP32.

        Raises ``KeyError`` unless each of these operators was measured in both dtypes.
        """
        compute = self._task.policy.compute
        reasons = {}
        for node in self._task.may_be_low - low:
            in_low, in_full = (1e3 * self._table.seconds_of(node, is_low) for is_low in (True, False))
            slower = f"slower in {compute} here ({in_low:.2f} ms, {in_full:.2f} in FP32)"
            reasons[node] = slower if in_low >= in_full else f"{compute} does not pay for the casts here"
        return reasons


def without_waiting(profile: Mapping[Owner, float], operators: Mapping[Owner, int], step: float) -> dict[Owner, float]:
    """Return a profile, the seconds of each operator and cast, without the time of waiting after every operator.

    A profile is measured with a wait for the device after each operator; ``step``, the seconds of a whole step, with a
    single wait at its end. If the sum of ``profile`` is above ``step``, the difference is taken in equal shares from
    all operators that the bound graph runs; ``operators`` has their number for each key of ``profile``. No time falls
    below 0, and the sum becomes ``step``, within 0.1 %. If the sum is not above ``step``, the times stay.
    """
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
    """Return the name of the candidate, a plan that was timed, that wins the comparison of whole steps.

    ``times`` maps each candidate's name to the seconds of its steps, one for each round. A gain is how many times as
    fast one candidate is as another in a round. A candidate beats another if the lower quartile of its gains is above
    1, so that it is faster in three quarters of the rounds. FP32 is represented by ``CONVERTED``, with the workarounds
    against slow kernels, if this beats ``FULL``, plain FP32; otherwise by ``FULL``. Of the candidates in low precision,
    the one with the highest median gain over ``FULL`` wins if it beats that FP32; otherwise that FP32 wins. But if that
    one does not beat the plan of the rules, and this beats that FP32 too, the rules win: of plans that are as fast, the
    one with the fewest operators in FP32 needs the least memory.
    """

    def beats(name: str, other: str) -> bool:
        return _gain(times, name, other)[0] > 1

    full = CONVERTED if CONVERTED in times and beats(CONVERTED, FULL) else FULL
    others = [name for name in times if name not in (FULL, CONVERTED)]
    best = max(others, key=lambda name: _gain(times, name, FULL)[1], default=full)
    if RULES in times and beats(RULES, full) and not beats(best, RULES):
        return RULES
    return best if beats(best, full) else full


def _gain(times: Mapping[str, Sequence[float]], name: str, against: str) -> tuple[float, float, float]:
    """Return the quartiles, over the rounds, of how many times as fast ``name`` is as ``against``."""
    return quartiles([a / b for a, b in zip(times[against], times[name])])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of a non-empty list.

    Of 7 values they are the second, fourth and sixth by size (``statistics.quantiles``); a single value is all three.
    """
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _is_steady(times: Mapping[str, Sequence[float]]) -> bool:
    """Return True if the times vary so little that no more rounds are needed; False after a single round.

    For this, lower and upper quartile of each candidate may differ by 4 % of its median at most.
    """
    spreads = [quartiles(each) for each in times.values()]
    return len(times[FULL]) > 1 and all(high - low <= 0.04 * middle for low, middle, high in spreads)


def _first_line(error: Exception) -> str:
    """Return the last 120 characters of an error's first line that contains "rror", or of the text if none does."""
    return next((line for line in str(error).splitlines() if "rror" in line), str(error))[-120:]
