"""From an FP32 graph to the graph that runs: remove earlier casts, decide, insert casts, fit to the device's kernels.

``low_graph`` does this for one graph; a ``Conversion`` does it for all graphs of a network, which share parameters.
"""

from __future__ import annotations

import logging
from copy import copy as shallow_copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Callable, Collection, Iterable, Mapping, Set, TypeVar, Union

from .host import cpu
from .kernels.channels_last import WHY_SLOW, norms_over_rows
from .kernels.fit import fit_to_device
from .messages.callers import warn_user
from .messages.text import some
from .policy import Policy, as_policy, pattern_for
from .precision.casts import UNKNOWN, LowGraph, insert_casts, strip
from .precision.decide import decide
from .precision.graph import Graph, Node
from .precision.inputs import InputCheck
from .precision.operators import Options
from .precision.plan import Plan, PlannedGraph, check_fit, decisions_about, summed_in_fp32
from .precision.subgraphs import Body, set_bodies, wrongly_differentiated

logger = logging.getLogger("mxmp")
_WRONG_GRADIENTS = (
    "%s: in a graph MXNet gives wrong gradients through while_loop, and through a cond of whose branches only one "
    "reads a parameter, in FP32 too. Use foreach, or F.where on the results of both branches; or leave the block as "
    "Python: mxmp.convert(net, exclude=lambda name, block: ...)"
)
# Returns the plan of one graph under a policy or plan, given the names of the parameters that may be stored in float16
# or FP32, and those of the parameters that are stored in float16 already.
Decider = Callable[[Union[Policy, Plan], Set[str], Set[str]], Plan]


def low_graph(graph: Graph, how: Policy | Plan, device: str, *, keep_output_names: bool = False) -> tuple[Graph, Plan]:
    """Return a copy of an FP32 graph that computes in low precision on ``device``, and the plan that it follows.
    An earlier conversion is undone first. ``ValueError``: as ``decide``, or the plan is of another graph or device."""
    original = strip(graph)
    if isinstance(how, Plan):
        _check_device(how, device)
        plan = summed_in_fp32(how)
    else:
        plan = decide(original, how, device, Options(keep_output_names=keep_output_names))
    return emitted(original, plan).graph, plan


def emitted(
    graph: Graph,
    plan: Plan,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,  # without the workarounds for small inputs, except in bodies: see ``LargeInputs``
    avoid_slow_kernels: bool | None = None,  # False: only what keeps the graph right; None: as the plan says
) -> LowGraph:
    """Return the graph to run for an FP32 graph and its plan: with casts and workarounds, in bodies too.
    A variable that ``grad_req`` lacks gets every workaround that one of its values would need."""
    if avoid_slow_kernels is None:
        avoid_slow_kernels = plan.avoids_slow_kernels
    planned = PlannedGraph(graph, plan)
    low = insert_casts(planned, grad_req, large_inputs=large_inputs)
    for copy, node in low.source.items():
        # A body returns FP32, so that the states of a loop keep their dtype from one iteration to the next, and casts
        # what it reads, but for data and weights of a foreach (``Plan.within``).
        if node.subgraphs:
            low.bodies[node] = [
                (body, emitted(body.graph, inner, _added(node, body, grad_req), avoid_slow_kernels=avoid_slow_kernels))
                for body, inner in planned.within[node]
            ]
            set_bodies(copy, [each.graph for _, each in low.bodies[node]])
    fit_to_device(low, avoid_slow_kernels=avoid_slow_kernels)
    return low


def _added(loop: Node, body: Body, grad_req: Mapping[str, str]) -> dict[str, str]:
    """Return ``grad_req`` of a body's variables: MXNet adds the gradients of the iterations."""
    read = {variable.name: loop.inputs[position].node.name for variable, position in body.positions.items()}
    requested = {name: grad_req[outer] for name, outer in read.items() if outer in grad_req}
    return {name: "add" if request == "write" else request for name, request in requested.items()}


def emulated(how: Policy | Plan, device: str) -> Policy | Plan:
    """Return ``how``; of a GPU's float16 Plan a copy for ``device``, which may be a CPU that emulates float16."""
    if isinstance(how, Plan) and how.policy.compute == "float16" and how.device == "gpu":
        return replace(how, device=device)
    return how


@dataclass(frozen=True)
class Use:
    """How a network uses one of its graphs. All names are of the graph's variables."""

    device: str  # "cpu" or "gpu"
    parameters: Collection[str]
    stored: Mapping[str, bool] = field(default_factory=dict)  # True for float16: decided, also by nets that share them
    fixed: Collection[str] = ()  # parameters that stay in FP32, unless ``stored`` has them
    constants: Collection[str] = ()  # parameters that never train, and stay in FP32
    grad_req: Mapping[str, str] = field(default_factory=dict)  # without those that are not known
    training_shapes: Mapping[str, tuple] = field(default_factory=dict)  # of the inputs; empty for inference too
    non_fp32: Mapping[str, str] = field(default_factory=dict)  # why these are no dense FP32 arrays
    reads_data: bool = True  # False: the inputs may be features, which another graph computed
    large_inputs: bool = False  # see ``emitted``
    keep_output_names: bool = False
    strict: bool = False  # a plan must fit this graph; otherwise the rules decide for what it lacks
    fits: bool = False  # a plan has fitted another graph of the network, so it may lack all operators of this one


_Conversion = TypeVar("_Conversion", bound="Conversion")


class Conversion:
    """Converts all graphs of one network by one policy or plan: for training and inference, for buckets, for parts.
    They share parameters: the first graph that reads one decides how it is stored, and later ones use it so."""

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}  # of each parameter read so far: in float16, or in FP32?
        self.inputs = InputCheck()
        self._warned_of: set[str] = set()

    @property
    def policy(self) -> Policy:
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        return self.how if isinstance(self.how, Plan) else None

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep operators, by their names in a plan, in FP32 in all later graphs, which decide anew how parameters are
        stored."""
        # As any pattern, "fc1_fwd" also excludes nodes whose names begin with "fc1_fwd_".
        policy = as_policy(self.policy, map(pattern_for, nodes))
        self.how = replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy
        self.stored_low.clear()

    def excluding(self: _Conversion, nodes: Collection[str]) -> _Conversion:
        """Return a copy, which has recorded nothing, and keeps these nodes in FP32 too."""
        made = shallow_copy(self)
        made.stored_low = {}
        made.exclude(nodes)
        return made

    def build(self, graph: Graph, use: Use) -> tuple[Graph, Plan]:
        """Return the graph in low precision for an FP32 graph, and the plan that it follows. Raises ``ValueError`` as
        ``decide`` does, and if the plan is of another network or device. Records in ``stored_low`` how each parameter
        is to be stored; the caller stores it so."""
        original = strip(graph)
        plan = self._plan(original, use)
        if self.plan is not None:
            from .precision.edited import warn_of_plan

            warn_of_plan(original, self.plan, self._warned_of)
        low = emitted(original, plan, use.grad_req, large_inputs=use.large_inputs)
        for each in use.parameters:
            self.stored_low.setdefault(each, use.stored.get(each, each in plan.low_variables))
        if low.bodies:
            self._warn_once(wrongly_differentiated(original, use.grad_req), _WRONG_GRADIENTS)
        if use.device == "cpu" and plan.num_low:
            if plan.policy.compute == "float16":
                _log_that_float16_is_emulated()
            elif plan.tuned is None:
                _warn_of_slow_bfloat16()
        if use.device == "gpu":
            self._warn_once(norms_over_rows(original), f"%s: BatchNorm with another axis than 1. {WHY_SLOW}")
        return low.graph, plan

    def preview(self, graph: Graph, use: Use) -> Plan:
        """Return the plan that ``build`` would follow, with parameters as they are stored here; record nothing."""
        names = {*use.parameters}
        stored = {name: low for name, low in self.stored_low.items() if name in names}
        return self._plan(strip(graph), replace(use, stored=stored))

    def _plan(self, graph: Graph, use: Use) -> Plan:
        """Return the plan of one FP32 graph; where this conversion follows a plan, the rules decide for what it lacks,
        but not if the use is ``strict``."""
        if self.plan is not None:
            _check_device(self.plan, use.device)
            if use.strict:
                check_fit(graph.names(), self.plan)
        learned = {*use.parameters}.difference(use.constants)
        options = Options(
            keep_output_names=use.keep_output_names,
            training_shapes=use.training_shapes,
            learned=learned if use.reads_data else None,
            non_fp32=use.non_fp32,
        )

        def decided(how: Policy | Plan, undecided: set[str], low: set[str]) -> Plan:
            known = replace(options, parameters=undecided, stored_low=low)
            if not isinstance(how, Plan):
                return decide(graph, how, use.device, known)
            given = decisions_about(graph.names(), summed_in_fp32(how))
            plan = decide(graph, how.policy, use.device, replace(known, decided=given))
            if not use.fits and not plan.decisions.keys() & given.keys():
                check_fit(graph.names(), how)
            return replace(plan, tuned=how.tuned)

        low = {name for name, is_low in use.stored.items() if is_low}
        return self._decide(decided, use.device, learned.difference(use.fixed, use.stored), low)

    def _warn_once(self, names: Iterable[str], text: str) -> None:
        """Warn of operators of which this conversion has not warned yet; the ``%s`` of ``text`` stands for them."""
        found = [name for name in names if name not in self._warned_of]
        self._warned_of.update(found)
        if found:
            logger.warning(text, some(found))

    def _decide(self, decided: Decider, device: str, undecided: set[str], low: set[str]) -> Plan:
        """Return the plan of one FP32 graph; a subclass may decide otherwise. ``decided`` makes one from a policy."""
        return decided(self.how, undecided, low)


@lru_cache(maxsize=None)
def _log_that_float16_is_emulated() -> None:
    is_fast = not cpu.lacks("avx512_bf16") and not cpu.multiplies_bfloat16_slowly()
    fast = ". The fast dtype of this CPU is 'bfloat16'" if is_fast else ""
    logger.warning("float16 is emulated on a CPU, to show how it trains, and is slower than FP32%s", fast)


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16() -> None:
    if cpu.lacks("avx512_bf16", "amx_bf16"):
        emulated = "by oneDNN: expect no gain over FP32" if cpu.multiplies_bfloat16() else "in FP32, and slower than it"
        warn_user(f"this CPU has neither AVX512-BF16 nor AMX, so bfloat16 is emulated {emulated}")
    elif cpu.multiplies_bfloat16_slowly():
        warn_user(
            "this CPU multiplies bfloat16 at half the speed of FP32, as MXNet uses no AMX: train in FP32, or let "
            "mxmp.tune measure which operators gain"
        )


def _check_device(plan: Plan, device: str) -> None:
    if plan.device != device:
        raise ValueError(f"the plan was made for a {plan.device}, and the graph is to run on a {device}: plan it there")
