"""What there is to choose: the operators that may compute in either dtype, and the bytes that casts move."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Collection, Iterable, Mapping

import mxnet as mx

from ..callbacks import last_line
from ..kernels.fit import device_of
from ..kernels.norms import casts_inside
from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import UNKNOWN, strip
from ..precision.decide import decide
from ..precision.graph import Entry, Graph, Node, data_inputs
from ..precision.operators import Operators, Options
from ..precision.plan import Decision, Plan, PlannedGraph
from ..precision.rule import Kind, Rule
from ..precision.tuned import Tuned
from ..shapes import wanted_shapes
from .cut import Choice, Costs, cheapest
from .job import Crash, Job
from .stand_ins import needs_stand_in, with_stand_ins

# Names of two candidates: the plan of the rules, and that whose casts move the fewest bytes.
RULES, BYTES = "rules", "fewest bytes cast"
# Operators whose outputs have shapes that depend on values, or that MXNet does not infer.
_SHAPED_BY_VALUES = ("_cond", "_contrib_boolean_mask")


class Task:
    """The plans of one FP32 graph, all as safe as the rules, which differ in the operators of ``may_be_low`` alone.
    ``left_out`` has further operators that stay in FP32, with reasons; ``training_shapes`` is empty for inference."""

    def __init__(
        self,
        graph: Graph,
        policy: Policy,
        device: str,
        *,
        parameters: Collection[str] | None = None,
        learned: Collection[str] | None = None,
        keep_output_names: bool = False,
        slow_too: bool = False,
        left_out: Mapping[str, str] = UNKNOWN,
        training_shapes: Mapping[str, tuple] = UNKNOWN,
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.device = device
        self.names = graph.names()
        self._readers = graph.consumers()
        self._options = Options(
            parameters=parameters,
            learned=learned,
            keep_output_names=keep_output_names,
            training_shapes=training_shapes,
        )
        left = {node: name for node, name in self.names.items() if name in left_out}
        self._left_out = {name: Decision(node.op, False, left_out[name]) for node, name in left.items()}
        self.rules_plan = self._decide({})
        # ``slow_too`` lets in kernels that are right, but known to be slow.
        safe = may_compute_low(graph, policy, device, replace(self._options, slow_too=slow_too))
        safe = {node: kind for node, kind in safe.items() if node not in left}
        self._planned = PlannedGraph(graph, self.rules_plan)
        self.rule_of_node: Mapping[Node, Rule] = self._planned.rules
        self.matrix_operators = frozenset(node for node, kind in safe.items() if kind is Kind.LOW)
        self._norms = frozenset(casts_inside(graph, policy, device))
        # On a GPU in float16, BatchNorms too: always FP32, but "low" where cuDNN lets them read and write float16.
        self.may_be_low = frozenset(safe) | self._norms
        self._stored: Collection[Node] = ()  # parameters that may be stored in float16
        if policy.stores_low(device):
            most = self._decide({self.names[node]: Decision(node.op, True, "") for node in safe})
            self._stored = {
                node for node, name in self.names.items() if node.is_variable and name in most.low_variables
            }

    @cached_property
    def choice(self) -> Choice:
        """Return the choice of all of ``may_be_low``."""
        return Choice(self._planned, self.may_be_low, may_be_stored_low=self._stored)

    def low_nodes(self, plan: Plan) -> frozenset[Node]:
        """Return the operators in low precision under ``plan``, without those in bodies of loops and conditions."""
        planned = PlannedGraph(self.graph, plan)
        low = frozenset(node for node, decision in planned.decisions.items() if decision.low)
        read_low = {entry for entry, users in self._readers.items() if any(planned.wants_low(*user) for user in users)}
        return low | {node for node in self._norms if planned.is_low(node.inputs[0]) and Entry(node) in read_low}

    def plan(self, low: Collection[Node], reasons: Mapping[Node, str]) -> Plan:
        """Return the plan with ``low`` of ``may_be_low`` in low precision; ``reasons`` has texts for some of these."""
        by_rules = self.rules_plan.decisions
        own = {name: by_rules[name] for node, name in self.names.items() if not node.is_variable}
        # What the rules keep in FP32, and is not to choose, is FP32 in ``choice``; undecided it would follow its input.
        decided = {name: decision for name, decision in own.items() if not decision.low}
        for node in self.may_be_low - self._norms:
            name = self.names[node]
            decided[name] = by_rules[name]
            if by_rules[name].low is not (node in low) or node in reasons:
                decided[name] = Decision(node.op, node in low, reasons.get(node, "chosen by tuning"))
        if not low:  # bodies of loops and conditions, which follow the rules otherwise
            inside = {name: each.op for name, each in by_rules.items() if name not in own}
            decided.update({name: Decision(op, False, "all of the graph is FP32") for name, op in inside.items()})
        return self._decide(decided)

    def least_bytes(self, shapes: Mapping[Entry, tuple[int, ...]]) -> frozenset[Node]:
        """Return what is low under the plan, with all matrix operators low, whose casts move the fewest bytes."""
        moved, free = cast_bytes(shapes), self.may_be_low - self.matrix_operators
        choice = Choice(self._planned, free, self.matrix_operators, self._stored)
        # 1e-2: of plans with as few bytes, the one with the most operators in low precision.
        return cheapest(choice, Costs({}, dict.fromkeys(choice.free, 1e-2), moved, moved))

    def bytes_cast(self, plan: Plan, shapes: Mapping[Entry, tuple[int, ...]]) -> int:
        """Return the bytes that casts of ``plan`` move in a forward, without those in kernels and in loops."""
        moved = cast_bytes(shapes)
        return int(sum(moved[cast.tensor] for cast in emitted(self.graph, plan).casts_left))

    def _decide(self, decided: Mapping[str, Decision]) -> Plan:
        options = replace(self._options, decided={**decided, **self._left_out})
        return decide(self.graph, self.policy, self.device, options)


def fewest_bytes(job: Job) -> Plan:
    """Return the plan of ``tune(measure=False)``: all matrix operators low, casts that move the fewest bytes."""
    task, shapes = task_of(job, measured=False)
    plans = {RULES: task.rules_plan, BYTES: task.plan(task.least_bytes(shapes), {})}
    amounts = {name: task.bytes_cast(plan, shapes) for name, plan in plans.items()}
    chosen = BYTES
    if amounts[RULES] < amounts[BYTES] and task.matrix_operators <= task.low_nodes(task.rules_plan):
        chosen = RULES  # a kernel of the device casts where the cut does not know it
    return replace(plans[chosen], tuned=Tuned(chosen, job.training, cast_bytes=amounts), blocks=job.blocks)


def task_of(job: Job, measured: bool) -> tuple[Task, dict[Entry, tuple[int, ...]]]:
    """Return the task of a ``Job`` and the shapes of its graph; ``measured`` leaves out what cannot run there."""
    graph = strip(Graph.from_json(job.symbol, numpy=job.numpy[0]))
    names, left_out = graph.names(), {}
    shapes = shapes_of(graph, job.inputs)
    if measured:
        untimed = "only the user's process can run it, so that it could not be timed"
        left_out = {name: untimed for node, name in names.items() if needs_stand_in(node)}
        left_out.update(_crashing(graph, shapes, job.crashes))
    task = Task(
        *(graph, job.policy, device_of(job.ctx)),
        parameters=job.parameters,
        learned=job.learned,
        keep_output_names=job.parameters is None,
        slow_too=not measured,
        left_out=left_out,
        training_shapes=job.inputs if job.training else {},
    )
    return task, shapes


def _crashing(graph: Graph, shapes: Mapping[Entry, tuple], crashes: Iterable[Crash]) -> dict[str, str]:
    """Return why operators stay in FP32, by name: they crashed in low precision, or an equal operator did."""
    names = {name: signature(node, shapes) for node, name in graph.names().items() if not node.is_variable}
    found = {names[name]: crash.how for crash in crashes for name in crash.operators if name in crash.low}
    return {n: f"its low-precision kernel crashes here ({found[each]})" for n, each in names.items() if each in found}


def shapes_of(graph: Graph, known: Mapping[str, tuple[int, ...]]) -> dict[Entry, tuple[int, ...]]:
    """Return the shape of every tensor that is read or returned; ``known`` has those of inputs. Nothing runs."""
    entries = list(dict.fromkeys([*graph.consumers(), *graph.heads]))
    symbol = with_stand_ins(Graph(entries, graph.attrs, numpy=graph.numpy)).to_symbol()
    try:
        found = symbol.infer_shape_partial(**known)[1]
    except mx.MXNetError as error:
        raise ValueError(f"the shapes {dict(known)} do not fit: {last_line(error)}") from error
    # Of mx.np networks a scalar has the shape (), and what is not known None.
    known_all = (shape is not None and (shape or graph.numpy) and all(size > 0 for size in shape) for shape in found)
    unknown = [entry.node for entry, is_known in zip(entries, known_all) if not is_known]
    if unknown:
        missing = [node.name for node in unknown if node.name in symbol.list_inputs()]
        dynamic = [node for node in unknown if node.op in _SHAPED_BY_VALUES]
        if dynamic and not missing:
            raise ValueError(
                f"{dynamic[0].name!r} is a {dynamic[0].op}, of which MXNet knows no shape before it runs: tune what is "
                "before and behind it"
            )
        names = [name for name in data_inputs(graph) if name in missing] or missing or [node.name for node in unknown]
        raise ValueError(f"the shapes {dict(known)} do not say the shape of {wanted_shapes(names)}")
    return dict(zip(entries, found))


def cast_bytes(shapes: Mapping[Entry, tuple[int, ...]]) -> dict[Entry, float]:
    """Return the bytes that one cast of each tensor moves: for an element, 4 in FP32 and 2 in 16 bits."""
    return {entry: 6.0 * prod(shape) for entry, shape in shapes.items()}


def signature(node: Node, shapes: Mapping[Entry, tuple[int, ...]]) -> str:
    """Return a text, ``'Activation {"act_type": "relu"} 8x64'``, equal for the same kernel on the same shapes."""
    attrs = {name: value for name, value in sorted(node.attrs.items()) if not name.startswith("__")}
    inputs = ["x".join(map(str, shapes[entry])) for entry in node.inputs]
    return f"{node.op} {json.dumps(attrs)} {' '.join(inputs)}"


def may_compute_low(graph: Graph, policy: Policy, device: str, options: Options) -> dict[Node, Kind]:
    """Return the operators that a plan may have in low precision and round nothing that the rules would not round.
    Each has its kind, ``LOW`` or ``FOLLOW``."""
    decisions = decide(graph, policy, device, replace(options, any_kernel=True)).decisions
    operators, heads = Operators(graph, policy, device, options), {entry.node for entry in graph.heads}
    rules, names = operators.rules, operators.names
    found = {node: operators.kinds[node][0] for node in rules if node not in operators.fixed}
    found = {node: kind for node, kind in found.items() if kind in (Kind.LOW, Kind.FOLLOW)}
    low = {node for node in found if decisions[names[node]].low}
    for node in reversed(list(found)):
        users = operators.readers.get(node, [])
        # What only moves values, in front of these: rounding before it gives what rounding behind it gives.
        moves = rules[node].exact and users and node not in heads
        if moves and all(user in low and position not in rules[user].keep for user, position in users):
            low.add(node)
    return {node: kind for node, kind in found.items() if node in low}
