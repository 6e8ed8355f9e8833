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

    Only softmax and LayerNorm may; their kernels, forward and backward, sum in FP32. ``op`` and ``attrs`` are the
    operator's name and parameters as in Symbol JSON. A softmax must have no ``dtype``, and no ``temperature`` but 1,
    as its kernel would round it to float16. LayerNorm's kernels also read gamma and beta in float16, and round the mean
    and the deviation that the backward reads, so ``policy`` must have ``norm="compute"``, and LayerNorm no
    ``output_mean_var``. Its ``axis`` must be -1, and written so: over another axis MXNet sums in float16 even if the
    variable is set, as ``safe_acc`` is inverted there (``src/operator/nn/layer_norm-inl.h``).
    """
    if op in _LAYER_NORM:
        if policy.norm != "compute":
            return False
        return attrs.get("axis", "-1") == "-1" and not is_true(attrs.get("output_mean_var"))
    plain = ("None", "1", "1.0")
    return op in _SOFTMAX and attrs.get("temperature", "None") in plain and attrs.get("dtype", "None") == "None"
