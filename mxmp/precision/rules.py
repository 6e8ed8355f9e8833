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
    """Raised for an operator without a rule, because MXNet 1.9.1 does not register it: a plug-in may have done so.

    ``name`` is the operator's name. The message says how to set its dtype by ``low_ops`` or ``full_ops`` of a policy.
    """

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
    """Return a dict from each name and alias in ``Rule.operators`` of ``table`` to its rule.

    Raises ``ValueError`` if a name occurs twice.
    """
    found: dict[str, Rule] = {}
    for rule in table:
        for name in rule.operators.split():
            if name in found:
                raise ValueError(f"two rows for operator {name!r}")
            found[name] = rule
    return found


RULES = _by_operator(rule_table.TABLE)


def rule_of(name: str) -> Rule:
    """Return the rule of an operator, by its name or an alias; raises ``UnknownOperator`` if it has none.

    Names such as ``"_backward_Convolution"``, which contain "backward" and are not in the rule table, have one rule in
    common, of ``Kind.ALONE``: autograd makes these operators in the dtype of their forward operators.
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
    data_shape: tuple[int, ...] = (),
    slow_too: bool = False,
) -> str:
    """Return why an operator must stay in FP32 on a device although its rule allows low precision, or ``""``.

    It must if the device has no kernel for it in the compute dtype, or if that kernel is wrong, or is slower than
    FP32's and ``slow_too`` is False. ``op`` and ``attrs`` are its name and parameters as in Symbol JSON, ``compute`` is
    ``"float16"`` or ``"bfloat16"``, ``device`` ``"cpu"`` or ``"gpu"``. Some kernels are slow for some numbers of
    channels, or for few rows in training: ``channels`` is the number of channels of the first input, and ``data_shape``
    the first input's shape in training. None and ``()`` mean that these are not known; such a kernel then is no reason.
    """
    call = Call(op, attrs, channels, data_shape)
    for row in missing_kernels.TABLE.get((device, compute), ()):
        if (op in row.operators) is not row.all_others and not (slow_too and row.slow) and row.where(call):
            return row.reason_for(call)
    return ""
