"""Makes the plan of a graph by the rules: the dtype of each operator, and the reason.

Three sets, and one file for each question:

* FP32, where an operator must: by its rule, the policy, its arrays, or for want of a kernel (``operators.py``), or
  because a reader needs what low precision would take from its values (``needs.py``);
* low precision: the matrix operators that are left, for which all this is done;
* either: all others. They compute where fewer tensors are cast (``cost.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Collection

from ..messages import did_you_mean
from ..policy import Policy
from . import _mxnet, safe_sums
from .cost import Assignment
from .graph import Graph, Node
from .needs import Needs
from .operators import DEFAULT, Operators, Options
from .plan import Plan
from .rule import Kind
from .rules import RULES


def check_policy(policy: Policy, device: str, operators: Collection[str] = ()) -> None:
    """Raise ``ValueError`` if MXNet cannot compute on ``device`` (``"cpu"`` or ``"gpu"``) what ``policy`` says."""
    if policy.compute == "bfloat16" and device == "gpu":
        raise ValueError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' there, or run bfloat16 on the CPU"
        )
    for name in ("low_ops", "full_ops"):
        for op in getattr(policy, name):
            own = _mxnet.name_in_graphs(op)
            # ``operators``, of a graph, may be of an mx.library, which a process that measures has not loaded.
            if not own and op not in RULES and op not in operators:
                near = did_you_mean(op, [*RULES, *operators], 0.75)
                what = near or "; a type such as 'FullyConnected' is expected: blocks and nodes go in exclude"
                raise ValueError(f"Policy({name}=[{op!r}]): MXNet has no operator {op!r}{what}")
            if own not in ("", op):
                raise ValueError(f"Policy({name}=[{op!r}]): in graphs MXNet calls this operator {own!r}: use that name")
            rule = RULES.get(op)
            if rule and name == "low_ops" and rule.kind in (Kind.HEAD, Kind.ALONE):
                raise ValueError(f"Policy(low_ops=[{op!r}]): {op} cannot run in {policy.compute}: {rule.reason}")


def decide(graph: Graph, policy: Policy, device: str, options: Options = DEFAULT) -> Plan:
    """Return the plan of an FP32 graph by the rules: whether each operator computes in low precision, and why.
    Raises ``ValueError`` if ``check_policy`` refuses the policy, or ``rule_under`` an operator."""
    check_policy(policy, device, {node.op for node in graph.nodes()})
    if not policy.stores_low(device):
        options = replace(options, parameters=(), stored_low=())
    operators = Operators(graph, policy, device, options)
    assignment = Assignment(operators, Needs(operators).analyse())
    return Plan(
        policy,
        device,
        assignment.named(),
        frozenset(operators.names[variable] for variable in assignment.low_variables),
        tuple(pattern for pattern in policy.exclude if pattern in operators.unmatched),
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


def may_compute_low(graph: Graph, policy: Policy, device: str, options: Options = DEFAULT) -> dict[Node, Kind]:
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
