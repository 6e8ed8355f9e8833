"""The spine: from an FP32 graph to the graph that runs. Strip, decide, insert casts, fit to the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Collection, Mapping

from .kernels.fit import UNKNOWN, fit_to_device
from .policy import Policy
from .precision.casts import CastGraph, insert_casts, strip
from .precision.decide import decide
from .precision.graph import Graph
from .precision.plan import Plan, PlannedGraph, check_fit
from .precision.subgraphs import Body, bodies, set_bodies

__all__ = ["emitted", "low_graph"]


def low_graph(
    graph: Graph,
    how: Policy | Plan,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    stored_low: Collection[str] = (),
    keep_output_names: bool = False,
    grad_req: Mapping[str, str] = UNKNOWN,
    whole: bool | None = None,
    large_inputs: bool = False,
) -> tuple[Graph, Plan]:
    """The graph that computes in low precision on ``device``, and the plan that it follows.

    Casts of an earlier conversion are taken out first, so converting twice is converting once. With a
    Policy the rules decide (see ``decide`` for the keywords); a Plan has decided already. ``grad_req``,
    ``large_inputs``: see ``fit_to_device``.

    ``whole``: None where a Plan also says how variables are stored; otherwise the keywords do. True: it must be of this
    very graph. False: of a related one (another mode, bucket or part of a net), whose operators of the same names and
    types follow it, and all others the rules.

    Raises
    ------
    ValueError
        The policy cannot hold, or the plan is of another graph or device.
    """
    original = strip(graph)
    if isinstance(how, Plan):
        if how.device != device:
            raise ValueError(
                f"the plan was made for a {how.device}, and the graph is to run on a {device}: plan it there"
            )
        if whole:
            check_fit(original, how)
    if isinstance(how, Plan) and whole is None:
        plan = how
    else:
        plan = decide(
            original,
            how.policy if isinstance(how, Plan) else how,
            device,
            parameters=parameters,
            stored_low=stored_low,
            keep_output_names=keep_output_names,
            decided=how.decisions if isinstance(how, Plan) else {},
        )
        if isinstance(how, Plan):
            if not plan.decisions.keys() & how.decisions.keys():
                check_fit(original, how)
            plan = replace(plan, tuned=how.tuned)
    return emitted(original, plan, grad_req, large_inputs=large_inputs).graph, plan


def emitted(
    graph: Graph,
    plan: Plan,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,
    avoid_slow_kernels: bool | None = None,
) -> CastGraph:
    """Return the graph with casts on the plan's device, and in it the bodies of control flow.

    What a body reads and hands on is FP32, so states keep their dtype from one iteration to the next. Weights
    are cast in the body: outside, MXNet would sum their gradients over all iterations in low precision.

    A plan in which nothing computes low gives the graph as it is, but for the workarounds without which it fails or is
    wrong. ``avoid_slow_kernels``: see ``fit_to_device``; None: what the plan says.
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
