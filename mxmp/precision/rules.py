"""The rules by operator: which precision is safe, and which of the safe ones a device has kernels for.

The data are ``rule_table.py`` and ``missing_kernels.py``; what is read from them elsewhere is read from here.
"""

from __future__ import annotations

from typing import Iterable, Mapping

from . import missing_kernels, rule_table
from .missing_kernels import Call, is_volume
from .rule import Kind, Rule, When
from .rule_table import CUDA_BUILD_ONLY, REFUSED

__all__ = [
    "CUDA_BUILD_ONLY",
    "REFUSED",
    "RULES",
    "Kind",
    "Rule",
    "UnknownOperator",
    "When",
    "is_volume",
    "missing_kernel",
    "rule_of",
]


class UnknownOperator(KeyError, ValueError):  # noqa: N818
    """An operator that the table does not have: not one of MXNet 1.9.1's."""

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


RULES = _by_operator(rule_table.TABLE)


def rule_of(name: str) -> Rule:
    """Return the rule of an operator, by its name in Symbol JSON or an alias.

    Raises
    ------
    UnknownOperator
        For a name that MXNet 1.9.1 does not register.
    """
    if name in RULES:
        return RULES[name]
    if "backward" in name:
        return rule_table.BACKWARD
    raise UnknownOperator(name)


def missing_kernel(
    op: str,
    attrs: Mapping[str, str],
    compute: str,
    device: str,
    *,
    channels: int | None = None,
    slow_too: bool = False,
) -> str:
    """Return why ``op`` cannot run in ``compute`` on ``device`` though its rule allows it; empty if it can.

    ``channels``: of its data, where they are known. ``slow_too``: allow a kernel that is right, but slower than FP32
    with casts around it.
    """
    call = Call(op, attrs, channels)
    for row in missing_kernels.TABLE.get((device, compute), ()):
        if (op in row.operators) is not row.all_others and not (slow_too and row.slow) and row.where(call):
            return row.reason_for(call)
    return ""
