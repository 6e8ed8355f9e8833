"""The spine: from an FP32 graph to the graph that runs."""

from __future__ import annotations

from typing import Collection, Mapping

from ..policy import Policy
from .casts import insert_casts, strip
from .decide import decide
from .devices import UNKNOWN, fit_to_device
from .graph import Graph
from .plan import Plan, PlannedGraph

__all__ = ["low_graph"]


def low_graph(
    graph: Graph,
    how: Policy | Plan,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    stored_low: Collection[str] = (),
    keep_output_names: bool = False,
    grad_req: Mapping[str, str] = UNKNOWN,
) -> tuple[Graph, Plan]:
    """The graph that computes in low precision on ``device``, and the plan that it follows.

    Casts of an earlier conversion are taken out first, so converting twice is converting once. With a
    Policy the rules decide (see ``decide`` for the keywords); a Plan has decided already. ``grad_req``:
    see ``fit_to_device``.

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
        plan = how
    else:
        plan = decide(
            original,
            how,
            device,
            parameters=parameters,
            stored_low=stored_low,
            keep_output_names=keep_output_names,
        )
    return fit_to_device(insert_casts(PlannedGraph(original, plan)), device, grad_req), plan
