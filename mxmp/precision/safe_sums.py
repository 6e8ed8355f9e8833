"""Operators whose float16 GPU kernels sum in FP32 if the environment variable MXNET_SAFE_ACCUMULATION is set.

Without the variable they sum in float16. MXNet reads it at every call, so a float16 graph with such an operator is
right only in a process in which the variable is set. The source is MXNet 1.9.1, ``src/operator/nn/softmax-inl.h`` and
``layer_norm.cu``: the type of the sums is ``AType``.
"""

from __future__ import annotations

import os
from typing import Mapping

from ..policy import Policy
from .rule import is_true

VARIABLE = "MXNET_SAFE_ACCUMULATION"
REASON = f"its kernel reads and writes float16 and sums in FP32 ({VARIABLE}=1)"
_SOFTMAX = frozenset(["softmax", "_npx_softmax"])
_LAYER_NORM = frozenset(["LayerNorm", "_npx_layer_norm"])
# Without ``log_softmax``: losses sum its outputs, logarithms of probabilities, which need more than float16.
OPERATORS = _SOFTMAX | _LAYER_NORM


def is_set() -> bool:
    """Return whether ``MXNET_SAFE_ACCUMULATION`` is set to a value that MXNet takes for true, ``"1"`` or ``"true"``."""
    return is_true(os.environ.get(VARIABLE))


def may_be_float16(op: str, attrs: Mapping[str, str], policy: Policy) -> bool:
    """Return whether an operator may compute in float16 under ``policy`` if MXNET_SAFE_ACCUMULATION is set.

    Its kernels, forward and backward, must sum in FP32. ``op`` and ``attrs`` are its name and parameters as in Symbol
    JSON. LayerNorm's kernels also read gamma and beta in float16, and round the mean and the deviation that the
    backward reads, so LayerNorm needs ``norm="compute"``. The result is False for a LayerNorm over another axis than
    -1: MXNet sums it in float16 even if the variable is set, as ``safe_acc`` is inverted there
    (``src/operator/nn/layer_norm-inl.h``). It is False for a softmax that divides by a ``temperature``, which its
    kernel rounds to float16, and for one with a ``dtype``.
    """
    if op in _LAYER_NORM:
        if policy.norm != "compute":
            return False
        return attrs.get("axis", "-1") == "-1" and not is_true(attrs.get("output_mean_var"))
    plain = ("None", "1", "1.0")
    return op in _SOFTMAX and attrs.get("temperature", "None") in plain and attrs.get("dtype", "None") == "None"
