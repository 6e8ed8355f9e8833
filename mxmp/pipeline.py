"""From an FP32 graph to the graph that runs: remove earlier casts, decide, insert casts, fit to the device's kernels.

``low_graph`` does this for one graph; a ``Conversion`` does it for all graphs of a network, which share parameters.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial
from glob import escape
from typing import Any, Callable, Collection, Iterable, Mapping, Set, Union

from .kernels.channels_last import WHY_SLOW, norms_over_rows
from .kernels.fit import UNKNOWN, fit_to_device
from .policy import Policy, as_policy
from .precision.casts import CastGraph, insert_casts, strip
from .precision.decide import NO_SHAPES, decide
from .precision.graph import Graph
from .precision.plan import Plan, PlannedGraph, check_fit, summed_in_fp32
from .precision.subgraphs import Body, set_bodies, wrongly_differentiated

logger = logging.getLogger("mxmp")
# Returns the plan of one graph under a policy or plan, given the names of the parameters that may be stored in float16
# or FP32, and those of the parameters that are stored in float16 already.
Decider = Callable[[Union[Policy, Plan], Set[str], Set[str]], Plan]


def low_graph(graph: Graph, how: Policy | Plan, device: str, *, keep_output_names: bool = False) -> tuple[Graph, Plan]:
    """Return a copy of an FP32 graph that computes in low precision on ``device``, and the plan that it follows.
    An earlier conversion is undone first. ``ValueError``: as ``decide``, or the plan is of another graph or device."""
    original = strip(graph)
    if isinstance(how, Plan):
        plan = _planned_for(device, how)
    else:
        plan = decide(original, how, device, keep_output_names=keep_output_names)
    return emitted(original, plan).graph, plan


def emitted(
    graph: Graph,
    plan: Plan,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,  # without the workarounds for small inputs, except in bodies: see ``LargeInputs``
    avoid_slow_kernels: bool | None = None,  # False: only what keeps the graph right; None: as the plan says
) -> CastGraph:
    """Return the graph to run for an FP32 graph and its plan: with casts and workarounds, in bodies too.
    A variable that ``grad_req`` lacks gets every workaround that one of its values would need."""
    if avoid_slow_kernels is None:
        avoid_slow_kernels = plan.avoids_slow_kernels
    planned = PlannedGraph(graph, plan)
    casted = insert_casts(planned)
    for copy, node in casted.source.items():
        # A body returns FP32, so that the states of a loop keep their dtype from one iteration to the next, and casts
        # what it reads, but for data and weights of a foreach (``Plan.within``).
        if node.subgraphs:
            within = planned.within[node]
            read = {position: entry.node.name for position, entry in enumerate(node.inputs)}
            requested = {position: grad_req[name] for position, name in read.items() if name in grad_req}
            low = [(body, inner, _low_body(body, inner, requested, avoid_slow_kernels)) for body, inner in within]
            casted.bodies[node] = low
            set_bodies(copy, [each.graph for *_, each in low])
    casted.graph = fit_to_device(
        casted, plan.device, grad_req, large_inputs=large_inputs, avoid_slow_kernels=avoid_slow_kernels
    )
    return casted


def _low_body(body: Body, plan: Plan, requested: Mapping[int, str], avoid_slow_kernels: bool) -> CastGraph:
    """Return the graph to run for ``body``; ``requested`` has ``grad_req`` by position of the node's input."""
    within = {variable.name: requested[i] for variable, i in body.positions.items() if i in requested}
    # In a body MXNet adds the gradients of the iterations.
    added = {name: "add" if request == "write" else request for name, request in within.items()}
    return emitted(body.graph, plan, added, avoid_slow_kernels=avoid_slow_kernels)


def emulated(how: Policy | Plan, device: str) -> Policy | Plan:
    """Return ``how``; of a GPU's float16 Plan a copy for ``device``, which may be a CPU that emulates float16."""
    if isinstance(how, Plan) and how.policy.compute == "float16" and how.device == "gpu":
        return replace(how, device=device)
    return how


class Conversion:
    """Converts all graphs of one network by one policy or plan: for training and inference, for buckets, for parts.
    They share parameters: the first graph that reads one decides how it is stored, and later ones use it so."""

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}  # of each parameter read so far: in float16, or in FP32?
        self._wrong: set[str] = set()

    @property
    def policy(self) -> Policy:
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        return self.how if isinstance(self.how, Plan) else None

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these nodes in FP32 in all later graphs, which then decide anew how parameters are stored."""
        # As any pattern, "fc1_fwd" also excludes nodes whose names begin with "fc1_fwd_".
        policy = as_policy(self.policy, [escape(name) for name in nodes])
        self.how = replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy
        self.stored_low.clear()

    def build(
        self,
        graph: Graph,
        device: str,
        parameters: Iterable[str],
        *,
        stored: Mapping[str, bool],  # decided already: True for float16; also by nets that share parameters
        strict: bool,  # a plan must fit this graph; otherwise the rules decide for what it lacks
        fixed: Collection[str] = (),  # parameters that stay in FP32, unless ``stored`` has them
        constants: Collection[str] = (),  # parameters that never train, and stay in FP32
        reads_data: bool = True,  # False: the inputs may be features, which another graph computed
        keep_output_names: bool = False,
        grad_req: Mapping[str, str] = UNKNOWN,
        large_inputs: bool = False,
        training_shapes: Mapping[str, tuple] = NO_SHAPES,
        sparse: Mapping[str, str] = UNKNOWN,  # variables with sparse arrays or gradients, and the reasons
    ) -> tuple[Graph, Plan]:
        """Return the graph in low precision for an FP32 graph, and the plan that it follows.
        Records in ``stored_low`` how each parameter is to be stored; the caller stores it so. Other arguments are those
        of ``decide`` and ``emitted``. Raises ``ValueError`` as ``decide`` does, if the plan is of another network or
        device, or if the net would read in FP32 what another net stores in float16."""
        original, names = strip(graph), list(parameters)
        if self.plan is not None and strict:
            check_fit(original.names(), _planned_for(device, self.plan))
        learned = {*names}.difference(constants)
        undecided = {each for each in learned if each not in stored and each not in fixed}
        low = {each for each, is_low in stored.items() if is_low}
        options: dict[str, Any] = {
            "keep_output_names": keep_output_names,
            "training_shapes": training_shapes,
            "learned": learned if reads_data else None,
            "non_fp32": sparse,
        }
        plan = self._decide(partial(_decided, original, device, options), device, undecided, low)
        made = emitted(original, plan, grad_req, large_inputs=large_inputs).graph
        for each in names:
            self.stored_low.setdefault(each, stored.get(each, each in plan.low_variables))
        self._warn_of_control_flow(original, grad_req)
        if device == "cpu" and plan.policy.compute == "float16" and plan.num_low:
            _log_that_float16_is_emulated()
        if device == "gpu":
            self._warn_of_norms(original)
        return made, plan

    def preview(
        self,
        graph: Graph,
        device: str,
        parameters: Iterable[str],
        *,
        reads_data: bool = True,
        keep_output_names: bool = False,
        training_shapes: Mapping[str, tuple] = NO_SHAPES,
    ) -> Plan:
        """Return the plan that ``build`` would follow, and record nothing; ``parameters`` are without constants."""
        original, names = strip(graph), set(parameters)
        options: dict[str, Any] = {
            "keep_output_names": keep_output_names,
            "training_shapes": training_shapes,
            "learned": names if reads_data else None,
        }
        low = {each for each in names if self.stored_low.get(each)}
        undecided = {each for each in names if each not in self.stored_low}
        return self._decide(partial(_decided, original, device, options), device, undecided, low)

    def _warn_of_control_flow(self, graph: Graph, grad_req: Mapping[str, str]) -> None:
        found = [name for name in wrongly_differentiated(graph, grad_req) if name not in self._wrong]
        self._wrong.update(found)
        if found:
            logger.warning(
                "%s: in a graph MXNet gives wrong gradients through while_loop, and through a cond of whose branches "
                "only one reads a parameter, in FP32 too. Use foreach, or F.where on the results of both branches; or "
                "leave the block as Python: mxmp.convert(net, exclude=lambda name, block: ...)",
                ", ".join(found),
            )

    def _warn_of_norms(self, graph: Graph) -> None:
        found = [name for name in norms_over_rows(graph) if name not in self._wrong]
        self._wrong.update(found)
        if found:
            logger.warning("%s: BatchNorm with another axis than 1. %s", ", ".join(found[:3]), WHY_SLOW)

    def _decide(self, decided: Decider, device: str, undecided: set[str], low: set[str]) -> Plan:
        """Return the plan of one FP32 graph; a subclass may decide otherwise. ``decided`` makes one from a policy."""
        return decided(self.how, undecided, low)


@lru_cache(maxsize=None)
def _log_that_float16_is_emulated() -> None:
    logger.warning(
        "float16 is emulated on a CPU, to show how it trains, and is slower than FP32. The fast dtype of a CPU with "
        "AVX512-BF16 or AMX is 'bfloat16'"
    )


def _decided(
    graph: Graph, device: str, options: Mapping[str, Any], how: Policy | Plan, undecided: set[str], low: set[str]
) -> Plan:
    """Return a plan for one FP32 graph; where ``how`` is a plan, the rules decide for operators that it lacks."""
    given = _planned_for(device, how).decisions if isinstance(how, Plan) else {}
    policy = how.policy if isinstance(how, Plan) else how
    plan = decide(graph, policy, device, parameters=undecided, stored_low=low, decided=given, **options)
    if not isinstance(how, Plan):
        return plan
    if not plan.decisions.keys() & given.keys():
        check_fit(graph.names(), how)
    return replace(plan, tuned=how.tuned)


def _planned_for(device: str, plan: Plan) -> Plan:
    """Return ``plan`` as it is followed here; raise ``ValueError`` if it is for another device."""
    if plan.device != device:
        raise ValueError(f"the plan was made for a {plan.device}, and the graph is to run on a {device}: plan it there")
    return summed_in_fp32(plan)
