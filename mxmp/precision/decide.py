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
from . import _mxnet
from .cost import Assignment
from .graph import Graph
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
