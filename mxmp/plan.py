"""Which dtype each node of a graph computes in: the rules, the policy and the device's kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Collection

import mxnet as mx

from .graph import Entry, Graph, Node
from .policy import Policy
from .rules import REFUSED, RULES, Kind, Rule, missing_kernel, rule_of

__all__ = ["Decision", "Plan", "check_policy", "decide"]

# Symbol JSON writes a variable's dtype as MXNet's type code (mshadow/base.h), an operator's as a name.
_FLOAT32 = ("0", "float32", "None", "-1")
_DENSE = ("0", "-1", "default")
# Slots that hold trainable weights where no one says which variables are parameters.
_WEIGHT_SLOTS = {
    "Convolution": (1, 2),
    "Deconvolution": (1, 2),
    "FullyConnected": (1, 2),
    "RNN": (1,),
}


@dataclass(frozen=True)
class Decision:
    """One node's precision, why, and the rule that says which inputs and outputs stay FP32 in a low node."""

    low: bool
    reason: str
    rule: Rule


@dataclass
class Plan:
    """A decision for every operator of one graph, and the variables that are stored low."""

    graph: Graph
    policy: Policy
    device: str
    decisions: dict[Node, Decision] = field(default_factory=dict)
    low_variables: set[Node] = field(default_factory=set)
    unmatched: tuple[str, ...] = ()

    def is_low(self, entry: Entry) -> bool:
        """Whether the tensor is produced in the compute dtype."""
        decision = self.decisions.get(entry.node)
        if decision is None:
            return entry.node in self.low_variables
        return decision.low and entry.index not in decision.rule.keep_outputs

    def wants_low(self, node: Node, position: int) -> bool:
        """Whether ``node`` reads its input at ``position`` in the compute dtype."""
        decision = self.decisions[node]
        return decision.low and position not in decision.rule.keep

    @property
    def num_low(self) -> int:
        """How many operators compute in the compute dtype."""
        return sum(d.low for d in self.decisions.values())

    @property
    def stores_low(self) -> bool:
        """Whether parameters of low-precision operators are stored in float16."""
        if self.policy.params is not None:
            return self.policy.params == "float16"
        return self.policy.compute == "float16" and self.device == "gpu"


def check_policy(policy: Policy, device: str) -> None:
    """Raise ``ValueError`` where a policy names what MXNet or the device does not have."""
    if policy.compute == "bfloat16" and device == "gpu":
        raise ValueError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' there, or run bfloat16 on the CPU"
        )
    for name in ("low_ops", "full_ops"):
        for op in getattr(policy, name):
            if op not in RULES and not (hasattr(mx.sym, op) or hasattr(mx.sym._internal, op)):
                raise ValueError(f"Policy({name}=[{op!r}]): MXNet has no operator {op!r}")
            rule = RULES.get(op)
            if rule and name == "low_ops" and rule.kind in (Kind.HEAD, Kind.ALONE):
                raise ValueError(f"Policy(low_ops=[{op!r}]): {op} cannot run in {policy.compute}: {rule.reason}")


def decide(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    stored_low: Collection[str] = (),
    keep_output_names: bool = False,
) -> Plan:
    """Plan a graph by the rules alone, in one pass from inputs to heads.

    Parameters
    ----------
    graph : Graph
        In FP32, without casts of ours.
    policy : Policy
    device : {"cpu", "gpu"}
        Whose kernels the graph will meet.
    parameters : collection of str, optional
        Names of the variables that are parameters. Without it, those in the weight and bias slots
        of matrix operators are.
    stored_low : collection of str
        Names of variables that are stored low already, because another graph decided so.
    keep_output_names : bool
        Keep heads with several outputs in FP32: a cast cannot carry their output names.

    Raises
    ------
    ValueError
        Where the policy cannot hold on the device, or the graph has an operator without a rule.
    """
    check_policy(policy, device)
    plan = Plan(graph, policy, device)
    excluded = _Patterns(policy.exclude)
    foreign: dict[Node, str] = {}
    heads = {entry.node for entry in graph.heads if entry.index > 0} if keep_output_names else set()
    for node in graph.nodes():
        unwanted = excluded.match(node.name)
        rule = None if node.is_variable else _rule(node.op, policy)
        reason = _foreign(node, rule, foreign)
        if reason:
            foreign[node] = reason
        if rule is None:
            continue
        fixed = reason or unwanted
        if node in heads:
            fixed = fixed or "a head with several outputs keeps its names only without casts"
        low, why = (False, fixed) if fixed else _by_rule(node, rule, plan)
        plan.decisions[node] = Decision(low, why, rule)
    plan.unmatched = excluded.unmatched()
    if plan.stores_low:
        plan.low_variables = _low_variables(graph, plan, foreign, parameters)
        plan.low_variables |= {n for n in graph.nodes() if n.is_variable and n.name in stored_low}
    return plan


def _rule(op: str, policy: Policy) -> Rule:
    if op in REFUSED:
        raise ValueError(f"{op} cannot be trained with loss scaling: {REFUSED[op]}")
    if op not in RULES and op in policy.full_ops + policy.low_ops:
        return Rule(Kind.FULL, "named in the policy")
    return rule_of(op)


def _by_rule(node: Node, rule: Rule, plan: Plan) -> tuple[bool, str]:
    """Whether a node that nothing else fixes computes low, and why."""
    policy = plan.policy
    kind, reason = rule.resolve(node.attrs, policy.compute)
    if node.op in policy.full_ops:
        return False, "named in the policy's full_ops"
    if node.op in policy.low_ops:
        kind, reason = Kind.LOW, "named in the policy's low_ops"
    if kind is Kind.NORM:
        if policy.norm == "float32":
            return False, reason
        kind = Kind.FOLLOW
    if kind not in (Kind.LOW, Kind.FOLLOW):
        return False, reason
    missing = missing_kernel(node.op, node.attrs, policy.compute, plan.device)
    if missing:
        return False, missing
    if kind is Kind.FOLLOW:
        votes = [
            plan.is_low(entry)
            for position, entry in enumerate(node.inputs)
            if position not in rule.keep and position not in rule.params
        ]
        if not votes or not all(votes):
            return False, "follows its inputs, and one of them is FP32" if votes else reason
    return True, reason


def _foreign(node: Node, rule: Rule | None, foreign: dict[Node, str]) -> str:
    """Why a node's outputs are not dense FP32 tensors of ours to cast, or an empty string."""
    attrs = node.attrs
    dtype = attrs.get("__dtype__") if rule is None else attrs.get("dtype")
    if dtype is not None and dtype not in _FLOAT32:
        return f"the graph asks for dtype {dtype} here"
    storage = attrs.get("__storage_type__", attrs.get("stype", "0"))
    if storage not in _DENSE:
        return "sparse storage"
    if rule is None or dtype is not None:
        return ""
    for position, entry in enumerate(node.inputs):
        if position not in rule.keep and entry.node in foreign:
            return foreign[entry.node]
    return ""


def _low_variables(graph: Graph, plan: Plan, foreign: dict[Node, str], parameters: Collection[str] | None) -> set[Node]:
    """Variables that only low-precision operators read, and all of them in the compute dtype."""
    heads = {entry.node for entry in graph.heads}
    low = set()
    for entry, users in graph.consumers().items():
        variable = entry.node
        if not variable.is_variable or variable in foreign or variable in heads:
            continue
        if all(plan.wants_low(node, position) for node, position in users) and (
            variable.name in parameters
            if parameters is not None
            else all(position in _WEIGHT_SLOTS.get(node.op, ()) for node, position in users)
        ):
            low.add(variable)
    return low


class _Patterns:
    """The policy's ``exclude``: a pattern names nodes, or a block and thereby all that it contains."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._compiled = [(p, re.compile(f"{translate(p)}|{translate(p + '_*')}")) for p in patterns]
        self._matched: set[str] = set()

    def match(self, name: str) -> str:
        """Why ``name`` is excluded, or an empty string."""
        found = [pattern for pattern, compiled in self._compiled if compiled.match(name)]
        self._matched.update(found)
        return f"excluded by {found[0]!r}" if found else ""

    def unmatched(self) -> tuple[str, ...]:
        return tuple(p for p, _ in self._compiled if p not in self._matched)
