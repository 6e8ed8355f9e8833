"""Operators whose float16 GPU kernels sum in FP32 if MXNET_SAFE_ACCUMULATION is set, and in float16 otherwise.

MXNet reads the variable at every call. The source is MXNet 1.9.1, ``src/operator/nn/softmax-inl.h`` and
``layer_norm.cu``: the type of the sums is ``AType``.
"""

from __future__ import annotations

import os
from typing import Mapping

from ..policy import Policy
from .missing_kernels import is_true
from .rule import Rule

VARIABLE = "MXNET_SAFE_ACCUMULATION"
REASON = f"its kernel reads and writes float16 and sums in FP32 ({VARIABLE}=1)"


def is_set() -> bool:
    return is_true(os.environ.get(VARIABLE))


def may_be_float16(rule: Rule, attrs: Mapping[str, str], policy: Policy) -> bool:
    """Return whether a softmax or LayerNorm may compute in float16 if MXNET_SAFE_ACCUMULATION is set."""
    if not rule.sums_safely:
        return False
    if rule.reads_either:
        # The kernel of a softmax would round a temperature to float16.
        plain = ("None", "1", "1.0")
        return attrs.get("temperature", "None") in plain and attrs.get("dtype", "None") == "None"
    # The kernels of a LayerNorm also read gamma and beta in float16, and round the mean and the deviation that the
    # backward reads. Over another axis than the last they sum in float16 all the same: ``safe_acc`` is inverted there
    # (src/operator/nn/layer_norm-inl.h).
    if policy.norm != "compute":
        return False
    return attrs.get("axis", "-1") == "-1" and not is_true(attrs.get("output_mean_var"))
