"""The spine: from an FP32 graph to the graph that runs. Strip, decide, insert casts, fit to the device.

``low_graph`` does it for one graph; a ``Conversion`` does it for all graphs of a network, which share parameters.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from glob import escape
from typing import Collection, Iterable, Mapping

import mxnet as mx

from .kernels.fit import UNKNOWN, fit_to_device
from .policy import Policy, as_policy
from .precision.casts import CastGraph, insert_casts, strip
from .precision.decide import decide
from .precision.graph import Graph
from .precision.plan import Plan, PlannedGraph, check_fit
from .precision.subgraphs import Body, bodies, set_bodies

__all__ = ["Conversion", "emitted", "low_graph"]

logger = logging.getLogger("mxmp")


def low_graph(
    graph: Graph,
    how: Policy | Plan,
    device: str,
    *,
    keep_output_names: bool = False,
    grad_req: Mapping[str, str] = UNKNOWN,
    large_inputs: bool = False,
) -> tuple[Graph, Plan]:
    """Return the graph that computes in low precision on ``device``, and the plan that it follows.

    Casts of an earlier conversion are removed first, so converting twice is converting once. With a Policy the rules
    decide (see ``decide``); a Plan has decided already. ``grad_req``, ``large_inputs``: see ``fit_to_device``.

    Raises
    ------
    ValueError
        The policy cannot hold, or the plan is of another graph or device.
    """
    original = strip(graph)
    if isinstance(how, Plan):
        plan = _planned_for(device, how)
    else:
        plan = decide(original, how, device, keep_output_names=keep_output_names)
    return emitted(original, plan, grad_req, large_inputs=large_inputs).graph, plan


def emitted(
    graph: Graph,
    plan: Plan,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,
    avoid_slow_kernels: bool | None = None,
) -> CastGraph:
    """Return the graph with casts for the plan's device, in the bodies of control flow too.

    A body reads and returns FP32, so states keep their dtype from one iteration to the next. Weights are cast in the
    body: outside, MXNet would sum their gradients over all iterations in low precision.

    A plan in which nothing computes in low precision gives the graph as it is, but for the workarounds without which it
    fails or is wrong. ``avoid_slow_kernels``: see ``fit_to_device``; None: what the plan says.
    """
    if avoid_slow_kernels is None:
        avoid_slow_kernels = plan.avoids_slow_kernels
    planned = PlannedGraph(graph, plan)
    casted = insert_casts(planned)
    for copy, node in casted.source.items():
        if node.subgraphs:
            within = [(body, plan.within(body, planned.names[node])) for body in bodies(node)]
            set_bodies(copy, [_low_body(body, inner, grad_req, avoid_slow_kernels) for body, inner in within])
    casted.graph = fit_to_device(
        casted, plan.device, grad_req, large_inputs=large_inputs, avoid_slow_kernels=avoid_slow_kernels
    )
    return casted


def _low_body(body: Body, plan: Plan, grad_req: Mapping[str, str], avoid_slow_kernels: bool) -> Graph:
    requested = {v.name: grad_req[e.node.name] for v, e in body.outer.items() if e.node.name in grad_req}
    # Each iteration adds its gradient to those of the iterations after it.
    added = {name: "add" if request == "write" else request for name, request in requested.items()}
    return emitted(body.graph, plan, added, avoid_slow_kernels=avoid_slow_kernels).graph


class Conversion:
    """One conversion of one network: what decides its dtypes, and how its parameters are stored.

    The first graph that reads a parameter decides how it is stored; every later graph follows.

    Attributes
    ----------
    how : Policy or Plan
    stored_low : dict of str to bool
        By the name of each parameter that a graph has read: whether it is float16, with an FP32 master.
    """

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}

    @property
    def policy(self) -> Policy:
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        """The Plan that decides, None where the rules do."""
        return self.how if isinstance(self.how, Plan) else None

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these nodes in FP32 too; the next graphs decide again how the parameters are stored."""
        policy = as_policy(self.policy, [escape(name) for name in nodes])
        self.how = replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy
        self.stored_low.clear()

    def build(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Iterable[str],
        *,
        stored: Mapping[str, bool],
        strict: bool,
        fixed: Collection[str] = (),
        keep_output_names: bool = False,
        grad_req: Mapping[str, str] = UNKNOWN,
        large_inputs: bool = False,
    ) -> tuple[Graph, Plan]:
        """Return the graph in low precision for an FP32 Symbol, and the plan that it follows.

        Logs, once in a process, that float16 is emulated on a CPU. Raises ``ValueError`` where the plan is of another
        network, or a parameter is needed in another dtype than it is stored in.

        Parameters
        ----------
        parameters : iterable of str
            The names of all parameters that it reads.
        stored : mapping of str to bool
            For parameters that are stored already, whether in low precision.
        strict : bool
            A Plan must be of this very graph. Otherwise it may be of another mode, bucket or part of the network:
            operators of the same names and types follow it, and all others follow the rules.
        fixed : collection of str
            Parameters that stay FP32 unless they are stored in low precision already.
        keep_output_names, grad_req, large_inputs
            As for ``low_graph``.
        """
        original, names = strip(Graph.from_symbol(symbol)), list(parameters)
        if self.plan is not None and strict:
            check_fit(original.names(), _planned_for(device, self.plan))
        undecided = {each for each in names if each not in stored and each not in fixed}
        low = {each for each, is_low in stored.items() if is_low}
        plan = self._decide(self.how, original, device, undecided, low, keep_output_names)
        graph = emitted(original, plan, grad_req, large_inputs=large_inputs).graph
        for each in names:
            self.stored_low.setdefault(each, stored.get(each, each in plan.low_variables))
        if device == "cpu" and plan.policy.compute == "float16" and plan.num_low:
            _log_that_float16_is_emulated()
        return graph, plan

    def _decide(
        self, how: Policy | Plan, graph: Graph, device: str, undecided: set[str], low: set[str], keep_output_names: bool
    ) -> Plan:
        """Return the plan for a graph that has parameters in low precision already, ``low``.

        A Plan decides where operators have the same names and types, the rules elsewhere. The plan decides how the
        parameters ``undecided`` are stored.
        """
        decided = _planned_for(device, how).decisions if isinstance(how, Plan) else {}
        plan = decide(
            graph,
            how.policy if isinstance(how, Plan) else how,
            device,
            parameters=undecided,
            stored_low=low,
            keep_output_names=keep_output_names,
            decided=decided,
        )
        if not isinstance(how, Plan):
            return plan
        if not plan.decisions.keys() & decided.keys():
            check_fit(graph.names(), how)
        return replace(plan, tuned=how.tuned)


@lru_cache(maxsize=None)
def _log_that_float16_is_emulated() -> None:
    """Log, once in a process, what float16 on a CPU is for."""
    logger.warning(
        "float16 is emulated on a CPU, to show how it trains, and is slower than FP32. The fast dtype of a CPU with "
        "AVX512-BF16 or AMX is 'bfloat16'"
    )


def _planned_for(device: str, plan: Plan) -> Plan:
    """Return ``plan``. Raises ``ValueError`` where it was made for another device."""
    if plan.device != device:
        raise ValueError(f"the plan was made for a {plan.device}, and the graph is to run on a {device}: plan it there")
    return plan
