"""One call of an operator: its inputs, how they are drawn, its attributes, its graph, and what mxmp emits for it."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Iterator, NamedTuple

import numpy as np

from mxmp.pipeline import low_graph
from mxmp.policy import Policy
from mxmp.precision.casts import is_ours
from mxmp.precision.decide import decide
from mxmp.precision.graph import Entry, Graph, Node
from mxmp.precision.plan import Decision, Plan
from mxmp.precision.rule import Kind
from mxmp.precision.rules import RULES


class Input(NamedTuple):
    """One input: its shape, how its values are drawn, and whether a gradient is asked for."""

    shape: tuple[int, ...]
    draw: Any = "normal"  # "normal", "positive", "wide", an integer n for indices below n, or the values themselves
    grad: bool = True
    dtype: str = "float32"

    def values(self, rng: np.random.RandomState) -> np.ndarray:
        if isinstance(self.draw, int):
            return rng.randint(0, self.draw, self.shape).astype("float32")
        if not isinstance(self.draw, str):
            return np.broadcast_to(np.asarray(self.draw, "float32"), self.shape).copy()
        value = rng.normal(0, 1, self.shape).astype("float32")
        if self.draw == "wide":
            value *= np.exp2(rng.uniform(-6, 4, self.shape)).astype("float32")
        return np.abs(value) + 0.5 if self.draw == "positive" else value


class Case(NamedTuple):
    """One call of an operator."""

    op: str
    inputs: tuple[Input, ...]
    attrs: dict[str, str]
    outputs: int = 1
    empty: bool = False

    @property
    def name(self) -> str:
        shapes = " ".join("x".join(map(str, i.shape)) or "scalar" for i in self.inputs)
        draws = ["wide"] if any(i.draw == "wide" for i in self.inputs) else []
        return " ".join([shapes, *draws, *(f"{k}={v}".replace(" ", "") for k, v in self.attrs.items())])

    def graph(self, amid: Node | None = None) -> Graph:
        """Return the FP32 graph of this one operator over variables in0, in1, ...

        ``amid``: an operator of one input to put behind every variable and in front of every head, such as a
        copy, or a cast.
        """
        ends = [Entry(Node("null", f"in{i}")) for i in range(len(self.inputs))]
        if amid:
            kept = [not spec.grad for spec in self.inputs]
            ends = [e if k else Entry(Node(amid.op, f"{e.node.name}_", amid.attrs, [e])) for e, k in zip(ends, kept)]
        node = Node(self.op, "op", dict(self.attrs), ends)
        heads = [Entry(node, i) for i in range(self.outputs)]
        if amid:
            back = {**amid.attrs, "dtype": "float32"} if amid.attrs else {}
            heads = [Entry(Node(amid.op, f"out{i}_", back, [head])) for i, head in enumerate(heads)]
        return Graph(heads, {"mxnet_version": ["int", 10901]})


CASES: dict[str, list[Case]] = {}


def add(names: str, *inputs: Any, outputs: int = 1, **attrs: Any) -> None:
    """Add a case for each of ``names``; an input is an ``Input`` or the shape of one."""
    made = tuple(i if isinstance(i, Input) else Input(i) for i in inputs)
    empty = any(0 in i.shape for i in made)
    for name in names.split():
        if RULES[name].kind not in (Kind.LOW, Kind.FOLLOW, Kind.NORM):
            continue
        case = Case(name, made, {k: str(v) for k, v in attrs.items()}, outputs, empty)
        if all(case.name != other.name for other in CASES.setdefault(name, [])):
            CASES[name].append(case)


def product(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield {k: v for k, v in zip(choices, values) if v is not None}


DTYPES = ("bfloat16", "float16")
_LOW = (Kind.LOW, Kind.FOLLOW, Kind.NORM)


def is_allowed(case: Case, dtype: str) -> str:
    """Return why the operator's rule keeps it in FP32 whatever the kernels are, or an empty string."""
    kind, reason = RULES[case.op].resolve(case.attrs, dtype)
    return "" if kind in _LOW else reason


def emitted(case: Case, dtype: str) -> bool:
    """Return whether the rules and the device's limits let the operator compute in ``dtype`` between low neighbours."""
    if is_allowed(case, dtype):
        return False
    policy = Policy(dtype, norm="compute", low_ops=(case.op,))
    return decide(case.graph(), policy, "cpu").decisions["op"].low


def forced_graph(case: Case, dtype: str) -> Graph:
    """Return the graph on a CPU where a plan says that the operator computes low, whatever the limits are."""
    policy = Policy(dtype, params="float32", norm="compute")
    plan = Plan(policy, "cpu", {"op": Decision(case.op, True, "measured")})
    return low_graph(case.graph(), plan, "cpu")[0]


_CONSTANTS = ("scalar", "alpha", "beta", "slope", "constant_value", "value")


def as_read(case: Case, dtype: str) -> Case:
    """Return the case with its constants as the emitted operator reads them, in float16 rounded."""
    emitted_as = (node.attrs for node in forced_graph(case, dtype).nodes() if node.op == case.op and not is_ours(node))
    constants = {k: v for k, v in next(emitted_as, {}).items() if k in _CONSTANTS}
    return case._replace(attrs={**case.attrs, **constants})


def digest(case: Case, dtype: str) -> str:
    """Return what changes where the emitted graph does: a measurement of another graph is stale."""
    return hashlib.sha1(forced_graph(case, dtype).to_json().encode()).hexdigest()[:8]
