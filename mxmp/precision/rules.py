"""The rules of MXNet's operators: which precision is safe, and for which safe precision a device has no kernel.

The data are in ``rule_table.py`` and ``missing_kernels.py``; other packages import them from here.
"""

from __future__ import annotations

from typing import Iterable, Mapping

from . import missing_kernels, rule_table
from .missing_kernels import Call, leaves_cudnn, spatial_axes
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
    "leaves_cudnn",
    "missing_kernel",
    "rule_of",
    "spatial_axes",
]


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


RULES = _by_operator(rule_table.TABLE)


def rule_of(name: str) -> Rule:
    """Return the rule of an operator, by its name or an alias; raises ``UnknownOperator`` if it has none."""
    if name in RULES:
        return RULES[name]
    # Autograd makes "_backward_Convolution" in the dtype of its forward operator.
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
    data_shape: tuple[int, ...] = (),
    slow_too: bool = False,
) -> str:
    """Return why an operator stays in FP32 on ``device`` although its rule allows ``compute``, or ``""``.
    ``channels`` and ``data_shape``, the shape in training, are of the first input; None and ``()`` if not known."""
    call = Call(op, attrs, channels, data_shape)
    for row in missing_kernels.TABLE.get((device, compute), ()):
        if (op in row.operators) is not row.all_others and not (slow_too and row.slow) and row.where(call):
            return row.reason_for(call)
    return ""
