"""The rules of MXNet's operators by name, and what they say under a policy; the data are in ``rule_table.py``."""

from __future__ import annotations

from typing import Iterable, Mapping

from ..policy import Policy
from .rule import Kind, Rule
from .rule_table import BACKWARD, REFUSED, TABLE


class UnknownOperator(KeyError, ValueError):  # noqa: N818
    """Raised for an operator without a rule: MXNet 1.9.1 does not register it, but a plug-in may have done so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"mxmp has no precision rule for operator {self.name!r}: MXNet 1.9.1 does not register it. "
            f"Say what is safe: Policy(full_ops=[{self.name!r}]) keeps it in FP32, "
            f"Policy(low_ops=[{self.name!r}]) computes it in the compute dtype"
        )


def _by_operator(table: Iterable[Rule]) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for rule in table:
        for name in rule.operators.split():
            if name in found:
                raise ValueError(f"two rows for operator {name!r}")
            found[name] = rule
    return found


RULES = _by_operator(TABLE)


def rule_of(name: str) -> Rule:
    """Return the rule of an operator, by its name or an alias; raises ``UnknownOperator`` if it has none."""
    if name in RULES:
        return RULES[name]
    # Autograd makes "_backward_Convolution" in the dtype of its forward operator.
    if "backward" in name:
        return BACKWARD
    raise UnknownOperator(name)


def rule_under(policy: Policy, op: str) -> Rule:
    """Return the rule of ``op``; an operator that only the policy knows, such as a plug-in's, has one too.
    Raises ``UnknownOperator`` for any other without a rule, and ``ValueError`` for one of ``REFUSED``."""
    if op in REFUSED:
        raise ValueError(f"{op} cannot be trained with loss scaling: {REFUSED[op]}")
    if op not in RULES and op in policy.full_ops + policy.low_ops:
        return Rule(Kind.FULL, "only the policy knows it")
    return rule_of(op)


def kind_under(policy: Policy, op: str, rule: Rule, attrs: Mapping[str, str], *, squares: bool) -> tuple[Kind, str]:
    """Return how an operator takes part under a policy, as if the device had every kernel, and why.
    ``squares``: it multiplies a tensor by itself."""
    kind, reason = rule.resolve(attrs, policy.compute)
    if op in policy.full_ops:
        return Kind.FULL, "the policy's full_ops names it"
    if op in policy.low_ops:
        kind, reason = Kind.LOW, "the policy's low_ops names it"
    # A BatchNorm that stays NORM is FP32 in the plan; on a GPU ``kernels/norms.drop_casts`` may drop its casts.
    if kind is Kind.NORM and policy.norm == "compute":
        kind = Kind.FOLLOW
    if kind is Kind.FOLLOW and squares:
        return Kind.FULL, "it squares its input, and squares leave float16's range and cancel in a variance"
    return kind, reason


def draws(op: str, attrs: Mapping[str, str]) -> bool:
    """Return whether an operator with these parameters draws random numbers, in training at least."""
    return op in RULES and RULES[op].draws_with(attrs)
