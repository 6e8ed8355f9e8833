"""From an FP32 graph to the graph that runs: remove earlier casts, decide, insert casts, fit to the device's kernels.

``low_graph`` does this for one graph; a ``Conversion`` does it for all graphs of a network, which share parameters.
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
    """Return the graph that computes in low precision, and the plan that it follows.

    Casts and workarounds of an earlier conversion are removed first, so converting twice is converting once. ``graph``
    is not changed.

    Parameters
    ----------
    graph : Graph
        The FP32 graph, or one that was converted before.
    how : Policy or Plan
        A policy, under which the rules decide (see ``decide``), or a plan, whose decisions are taken.
    device : {"cpu", "gpu"}
        Where the graph will run.
    keep_output_names : bool
        Keep an operator in FP32 where a cast would rename the outputs of the graph (see ``decide``).
    grad_req : mapping of str to str
        From the names of variables to their requested gradients, ``"write"``, ``"add"`` or ``"null"``. Some workarounds
        depend on them; variables that are not in it may have any.
    large_inputs : bool
        Whether the graph will run only at shapes for which ``LargeInputs`` in ``kernels/padding.py`` is true. The
        workarounds for small inputs are then left out.

    Raises
    ------
    ValueError
        The policy cannot hold on the device, or the plan is of another graph or device.
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
    """Return the graph that runs by a plan: with casts and with the workarounds for the plan's device.

    Bodies of control flow are included. A body reads and returns FP32, so that the states of a loop keep their dtype
    from one iteration to the next. Weights are cast inside the body; if they were cast outside, MXNet would sum their
    gradients over the iterations in low precision. If nothing computes in low precision, the graph gets no casts and
    only the workarounds without which it fails or is wrong. ``graph`` is not changed.

    Parameters
    ----------
    graph : Graph
        The FP32 graph, without casts that mxmp inserted.
    plan : Plan
        A plan of this graph; otherwise ``ValueError`` is raised.
    grad_req, large_inputs
        As for ``low_graph``.
    avoid_slow_kernels : bool, optional
        Whether to apply the workarounds against slow kernels as well. Default: ``plan.avoids_slow_kernels``.
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
    """Return the graph to run as a body of control flow, with the casts of ``plan`` and the workarounds.

    Parameters
    ----------
    body : Body
        The FP32 body.
    plan : Plan
        The part of the plan that is about it (``Plan.within``).
    grad_req : mapping of str to str
        The requested gradients of the graph around the body, by the names of variables there.
    avoid_slow_kernels : bool
        As for ``emitted``.
    """
    requested = {v.name: grad_req[e.node.name] for v, e in body.outer.items() if e.node.name in grad_req}
    # In a body MXNet adds the gradients of the iterations.
    added = {name: "add" if request == "write" else request for name, request in requested.items()}
    return emitted(body.graph, plan, added, avoid_slow_kernels=avoid_slow_kernels).graph


class Conversion:
    """One conversion of one network: what decides the dtypes in its graphs, and how its parameters are stored.

    ``convert`` and Module make one for each network, and it lives as long as the network is converted. A network has
    several graphs: for training and inference, for each bucket, for parts that are called alone. They share parameters,
    so the first graph that reads a parameter decides how it is stored, and later graphs follow.

    Attributes
    ----------
    how : Policy or Plan
        A policy, under which the rules decide, or a plan, whose decisions are taken.
    stored_low : dict of str to bool
        From the name of each parameter that a graph has read to whether it is stored in float16, with FP32 master
        weights.
    """

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}

    @property
    def policy(self) -> Policy:
        """Return the policy of the conversion; if a plan decides, the plan's policy."""
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        """Return the plan whose decisions are taken, or None where the rules decide."""
        return self.how if isinstance(self.how, Plan) else None

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators with the names ``nodes`` in FP32 in the graphs that ``build`` makes from now on.

        The next graphs also decide anew how the parameters are stored.
        """
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

        Notes in ``stored_low`` how each parameter is to be stored. If the graph computes in float16 on a CPU, logs a
        warning, once in a process, that this is an emulation.

        Parameters
        ----------
        symbol : Symbol
            The FP32 graph. Casts of an earlier conversion are removed.
        device : {"cpu", "gpu"}
            Where the graph will run.
        parameters : iterable of str
            The names of all parameters that the Symbol reads.
        stored : mapping of str to bool
            From each parameter whose storage was decided before to whether it is stored in float16.
        strict : bool
            With a plan: True raises an error unless the plan is of this very graph. False allows another mode, bucket
            or part of the network: operators with the same name and type follow the plan, and the rules decide for all
            others.
        fixed : collection of str
            Parameters that stay FP32 unless ``stored`` says otherwise.
        keep_output_names, grad_req, large_inputs
            As for ``low_graph``.

        Raises
        ------
        ValueError
            The plan is of another network or device, the policy cannot hold on the device, or a parameter that another
            Gluon net stores in float16 is needed in FP32.
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
        """Return the plan of one graph by the rules, or by a plan where operators have the same name and type as in it.

        Parameters
        ----------
        how : Policy or Plan
            What decides; the rules decide for operators that a plan does not have.
        graph : Graph
            The FP32 graph.
        device : {"cpu", "gpu"}
            Where the graph will run.
        undecided : set of str
            Parameters for which the plan decides whether they are stored in float16.
        low : set of str
            Parameters that are stored in float16 already.
        keep_output_names : bool
            As for ``low_graph``.

        Raises
        ------
        ValueError
            The plan ``how`` has no operator of this graph, or is for another device.
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
    """Log a warning, once in a process, that float16 on a CPU is emulated and slow, and that bfloat16 may be fast."""
    logger.warning(
        "float16 is emulated on a CPU, to show how it trains, and is slower than FP32. The fast dtype of a CPU with "
        "AVX512-BF16 or AMX is 'bfloat16'"
    )


def _planned_for(device: str, plan: Plan) -> Plan:
    """Return ``plan``; raises ``ValueError`` if it was made for another device than ``device``."""
    if plan.device != device:
        raise ValueError(f"the plan was made for a {plan.device}, and the graph is to run on a {device}: plan it there")
    return plan
