"""What mxmp emits for a case: the graph with its operator in a low dtype, and whether the rules ask for it."""

from __future__ import annotations

import hashlib

from mxmp.pipeline import low_graph
from mxmp.policy import Policy
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision, Plan
from mxmp.precision.rules import RULES, Kind

from .case import Case

DTYPES = ("bfloat16", "float16")
_LOW = (Kind.LOW, Kind.FOLLOW, Kind.NORM)


def is_allowed(case: Case, dtype: str) -> str:
    """Why the operator's rule keeps it in FP32 whatever the kernels are, or an empty string."""
    kind, reason = RULES[case.op].resolve(case.attrs, dtype)
    return "" if kind in _LOW else reason


def emitted(case: Case, dtype: str) -> bool:
    """Whether the rules and the device's limits let the operator compute in ``dtype`` between low neighbours."""
    if is_allowed(case, dtype):
        return False
    policy = Policy(dtype, norm="compute", low_ops=(case.op,))
    return decide(case.graph(), policy, "cpu").decisions["op"].low


def forced_graph(case: Case, dtype: str) -> Graph:
    """The graph on a CPU where a plan says that the operator computes low, whatever the limits are."""
    policy = Policy(dtype, params="float32", norm="compute")
    plan = Plan(policy, "cpu", {"op": Decision(case.op, True, "measured")})
    return low_graph(case.graph(), plan, "cpu")[0]


def digest(case: Case, dtype: str) -> str:
    """Changes where the emitted graph does: a measurement of another graph is stale."""
    return hashlib.sha1(forced_graph(case, dtype).to_json().encode()).hexdigest()[:8]
