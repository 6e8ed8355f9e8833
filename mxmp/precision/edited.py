"""Plans that were edited by hand: what they have in low precision and the rules would not."""

from __future__ import annotations

import logging

from ..messages import some
from . import safe_sums
from .graph import Graph
from .operators import Operators, Options
from .plan import Plan
from .rule import Kind

logger = logging.getLogger("mxmp")


def warn_of_plan(graph: Graph, plan: Plan, known: set[str]) -> None:
    """Warn of what a plan, edited by hand, has in low precision and the rules would not; ``ValueError`` if nothing can.
    ``graph`` is FP32. ``known`` names the operators of earlier warnings, and gets those of this one."""
    found = {name: why for name, why in doubtful(graph, plan).items() if name not in known}
    known.update(found)
    if found:
        logger.warning(
            "the plan has %s in %s, which the rules keep in FP32: %s. If that is meant, make the plan of a policy "
            "whose low_ops name the operator",
            some(list(found), 1),
            plan.policy.compute,
            next(iter(found.values())),
        )


def doubtful(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return what ``plan`` has in low precision and the rules under its policy would not, or the device has no kernel
    for, with the reasons, by name. Raises ``ValueError`` for an operator that no policy may have in low precision."""

    def operators(*, any_kernel: bool) -> Operators:
        return Operators(graph, plan.policy, plan.device, Options(any_kernel=any_kernel, slow_too=True))

    found: dict[str, str] = {}
    on_device, by_rule = operators(any_kernel=False), None
    for node, name in on_device.names.items():
        if node.is_variable or name not in plan.decisions:
            continue
        for body, _ in on_device.within.get(node, ()):
            prefix = body.prefix(name)
            found.update({prefix + inner: why for inner, why in doubtful(body.graph, plan.within(body, name)).items()})
        kind, reason = on_device.kinds[node]
        if not plan.decisions[name].low or kind in (Kind.LOW, Kind.FOLLOW):
            continue
        by_rule = by_rule or operators(any_kernel=True)
        if by_rule.kinds[node][0] in (Kind.HEAD, Kind.ALONE):
            raise ValueError(
                f"the plan has {name!r} in {plan.policy.compute}, and {node.op} cannot compute in it: {reason}"
            )
        if not safe_sums.may_be_float16(on_device.rules[node], node.attrs, plan.policy) or not safe_sums.is_set():
            found[name] = reason
    return found
