"""A precision plan: a decision for every operator of a graph, by node name, as plain data.

A plan can be saved, read by a person, compared with another and used in another process: the same graph
and the same plan give the same low-precision graph.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from glob import escape
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

from ..files import replacing
from ..policy import Policy, as_policy, is_policy_text, pattern_of
from .graph import Entry, Graph, Node
from .rules import REFUSED, RULES, Kind, Rule, rule_of
from .subgraphs import Body, bodies
from .tuned import CONVERTED, Tuned, texts

__all__ = ["Decision", "Plan", "PlannedGraph", "check_fit", "read_policy", "renamed", "rule_under"]

FORMAT = "mxmp-plan-1"


@dataclass(frozen=True)
class Decision:
    """Whether an operator computes in the compute dtype, and why."""

    op: str
    low: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """Which operators of one graph compute low, and which variables are stored low.

    Attributes
    ----------
    policy : Policy
        What the decisions were made for.
    device : {"cpu", "gpu"}
        Whose kernels the graph meets.
    decisions : mapping of str to Decision
        By node name, in graph order. Of nodes that share a name the second is ``name:1``, and so on
        (``Graph.names``). Nodes in the body of a loop are ``loop/name``.
    low_variables : frozenset of str
        Names of the variables that are stored in float16, with FP32 masters.
    unmatched : tuple of str
        Patterns of ``policy.exclude`` that matched nothing.
    tuned : Tuned or None
        How ``mxmp.tune`` found it; None for the plan that the rules make.
    blocks : tuple of str
        Prefixes of the names in the Gluon net that it was made for, of each block, outermost first. By them it fits
        a net of the same code whose blocks are numbered otherwise. Empty for a Symbol.
    """

    policy: Policy
    device: str
    decisions: Mapping[str, Decision]
    low_variables: frozenset[str] = frozenset()
    unmatched: tuple[str, ...] = ()
    tuned: Tuned | None = None
    blocks: tuple[str, ...] = ()

    @property
    def num_low(self) -> int:
        """Return how many operators compute in the compute dtype."""
        return sum(d.low for d in self.decisions.values())

    @property
    def avoids_slow_kernels(self) -> bool:
        """Return whether the graph runs with workarounds against slow FP32 kernels too, beside those that it needs.

        So it does where an operator computes low, and where tuning measured that FP32 is faster with them.
        """
        return self.num_low > 0 or (self.tuned is not None and self.tuned.chosen == CONVERTED)

    def within(self, body: Body, name: str) -> Plan:
        """The part for a body of the control-flow node ``name``; it hands on FP32, as it was traced."""
        prefix = body.prefix(name)
        own = {prefix + inner for inner in body.graph.names().values()}
        decisions = {
            key[len(prefix) :]: decision
            for key, decision in self.decisions.items()
            if key.startswith(prefix) and (key in own or not own.isdisjoint(_parents(key)))
        }
        return Plan(replace(self.policy, output="float32"), self.device, decisions)

    def differences(self, other: Plan) -> dict[str, tuple[Decision | None, Decision | None]]:
        """The nodes that the two plans treat differently: this plan's decision and the other's."""
        names = dict.fromkeys([*self.decisions, *other.decisions])
        pairs = {name: (self.decisions.get(name), other.decisions.get(name)) for name in names}
        return {name: (a, b) for name, (a, b) in pairs.items() if a is None or b is None or a.low != b.low}

    def save(self, path: str) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Read what ``save`` wrote. Raises ``ValueError`` where the file holds no plan."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r}: {error}") from error

    def to_json(self) -> str:
        """JSON, one operator a line."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "policy": str(self.policy),
            "device": self.device,
            "low_variables": sorted(self.low_variables),
            "unmatched": list(self.unmatched),
        }
        if self.blocks:
            head["blocks"] = list(self.blocks)
        if self.tuned is not None:
            head["tuned"] = self.tuned.to_dict()
        rows = [json.dumps([n, d.op, self._dtype(d), d.reason]) for n, d in self.decisions.items()]
        operators = ",\n  ".join(rows)
        return json.dumps(head, indent=1)[:-2] + f',\n "operators": [\n  {operators}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of ``to_json``. Raises ``ValueError`` for any other text."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']!r}")
            (policy,) = map(Policy.parse, texts([raw["policy"]]))
            dtypes = {policy.compute: True, "float32": False}
            rows = [texts(row) for row in raw["operators"]]
            decisions = {name: Decision(op, dtypes[dtype], why) for name, op, dtype, why in rows}
            if len(decisions) != len(rows) or raw["device"] not in ("cpu", "gpu"):
                raise ValueError("a name stands in it twice, or its device is unknown")
            tuned = Tuned.from_dict(raw["tuned"]) if "tuned" in raw else None
            stored, unmatched = frozenset(texts(raw["low_variables"])), texts(raw["unmatched"])
            return cls(policy, raw["device"], decisions, stored, unmatched, tuned, texts(raw.get("blocks", [])))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"not a precision plan as Plan.save writes it ({type(error).__name__}: {error})"
            ) from error

    def __str__(self) -> str:
        full: dict[tuple[str, str], int] = {}
        for decision in self.decisions.values():
            if not decision.low:
                key = (decision.op, decision.reason.partition(" (")[0])
                full[key] = full.get(key, 0) + 1
        most = sorted(full.items(), key=lambda item: -item[1])
        return "\n".join(
            [
                f"Plan ({self.policy}, {self.device}): {self.num_low} of {len(self.decisions)} operators in "
                f"{self.policy.compute}",
                *([] if self.tuned is None else [str(self.tuned)]),
                *(["In FP32:"] if most else []),
                *(f"  {number} {op}: {reason}" for (op, reason), number in most),
            ]
        )

    def _dtype(self, decision: Decision) -> str:
        return self.policy.compute if decision.low else "float32"

    def __hash__(self) -> int:
        return hash((self.policy, self.device, tuple(self.decisions.items())))


class PlannedGraph:
    """A graph and its plan, joined by node: what the passes over a graph read. ``names``: of all nodes.

    Raises
    ------
    ValueError
        The plan is of another graph; names the first operators that differ.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.names = names = graph.names()
        _check_fit(names, plan)
        self.graph = graph
        self.plan = plan
        self.decisions = {n: plan.decisions[name] for n, name in names.items() if not n.is_variable}
        self.rules = {n: rule_under(plan.policy, n.op) for n in self.decisions}
        self.low_variables = {n for n, name in names.items() if n.is_variable and name in plan.low_variables}

    def is_low(self, entry: Entry) -> bool:
        """Return whether the tensor is produced in the compute dtype."""
        if entry.node.is_variable:
            return entry.node in self.low_variables
        return self.decisions[entry.node].low and entry.index not in self.rules[entry.node].keep_outputs

    def wants_low(self, node: Node, position: int) -> bool:
        """Return whether ``node`` reads its input at ``position`` in the compute dtype."""
        return self.decisions[node].low and position not in self.rules[node].keep


def read_policy(policy: str | os.PathLike | Policy | Plan, exclude: Iterable[str] = ()) -> tuple[Policy, Plan | None]:
    """Return the Policy of a ``policy`` argument, and the Plan where it is a Plan or the path of a saved one.

    A string that ends in ``.json`` and does not begin as a policy string does is a path.

    Raises
    ------
    ValueError
        It is none, or patterns are given beside a Plan.
    OSError
        The file of a plan cannot be read.
    """
    if isinstance(policy, os.PathLike) or (
        isinstance(policy, str) and policy.endswith(".json") and not is_policy_text(policy)
    ):
        policy = Plan.load(os.fspath(policy))
    if not isinstance(policy, Plan):
        return as_policy(policy, exclude), None
    if list(exclude):
        raise ValueError("exclude is part of the policy that a Plan was made for: make the Plan with it")
    return policy.policy, policy


def rule_under(policy: Policy, op: str) -> Rule:
    """The operator's rule; one that only the policy knows is FP32 unless ``low_ops`` names it.

    Raises
    ------
    ValueError
        The operator cannot be trained with loss scaling, or nobody knows it.
    """
    if op in REFUSED:
        raise ValueError(f"{op} cannot be trained with loss scaling: {REFUSED[op]}")
    if op not in RULES and op in policy.full_ops + policy.low_ops:
        return Rule(Kind.FULL, "named in the policy")
    return rule_of(op)


def _parents(name: str) -> Iterator[str]:
    """The control-flow nodes that a node stands in."""
    return (name[:i] for i, letter in enumerate(name) if letter == "/")


def _operators(names: Mapping[Node, str], prefix: str = "") -> dict[str, str]:
    """All operators by name, those in bodies too."""
    found = {}
    for node, name in names.items():
        if not node.is_variable:
            found[prefix + name] = node.op
            for body in bodies(node):
                found.update(_operators(body.graph.names(), prefix + body.prefix(name)))
    return found


def check_fit(graph: Graph, plan: Plan) -> None:
    """Raise ``ValueError`` where a plan is of another graph; names the first operators that differ."""
    _check_fit(graph.names(), plan)


def _check_fit(names: Mapping[Node, str], plan: Plan) -> None:
    operators = _operators(names)
    planned: dict[str, Any] = {name: decision.op for name, decision in plan.decisions.items()}
    if operators == planned:
        return
    missing = sorted(operators.items() - planned.items())[:3]
    extra = sorted(planned.items() - operators.items())[:3]
    hint = ""
    if sorted(operators.values()) == sorted(planned.values()):
        hint = (
            ". The types are the same, so perhaps only names differ: build the network with those that the plan has, "
            "by prefix= or name=, or a Symbol's within `with mx.name.NameManager():`, which numbers from 0"
        )
    raise ValueError(
        f"the plan is of another graph: it has {len(planned)} operators, the graph {len(operators)}; "
        f"only in the graph: {missing or 'none'}; only in the plan: {extra or 'none'}{hint}"
    )


def renamed(plan: Plan, blocks: Sequence[str]) -> Plan:
    """Return the plan with the names of a network whose blocks, in the order of ``plan.blocks``, have these prefixes.

    MXNet numbers blocks through the whole process, so what is ``dense0_`` here is ``dense2_`` in the next network of
    the same code. Whether the plan then fits is for ``check_fit`` to say. It is returned as it is where it does not
    know its blocks, has more or fewer of them, or where two of them would get one name.
    """
    pairs = {(old, new) for old, new in zip(plan.blocks, blocks) if old and new}
    prefixes = dict(pairs)
    one_to_one = len(pairs) == len(prefixes) == len(set(prefixes.values()))
    if tuple(blocks) == plan.blocks or len(blocks) != len(plan.blocks) or not prefixes or not one_to_one:
        return plan
    # A name in the body of a loop stands after a slash. The longest prefix is that of the innermost block.
    longest_first = sorted(prefixes, key=len, reverse=True)
    known = re.compile(f"(^|/)({'|'.join(map(re.escape, longest_first))})")

    def rename(name: str) -> str:
        return known.sub(lambda found: found[1] + prefixes[found[2]], name)

    decisions = {rename(name): decision for name, decision in plan.decisions.items()}
    if len(decisions) != len(plan.decisions):
        return plan
    nodes = [re.sub(r":\d+$", "", name.rpartition("/")[2]) for name in plan.decisions]
    blocks_by_name = [old[:-1] for old, new in prefixes.items() if old.endswith("_") and new.endswith("_")]
    names = dict.fromkeys([*blocks_by_name, *nodes])
    excluded = {pattern: _renamed_pattern(pattern, names, rename) for pattern in plan.policy.exclude}
    return replace(
        plan,
        policy=replace(plan.policy, exclude=tuple(dict.fromkeys(new for found in excluded.values() for new in found))),
        decisions=decisions,
        low_variables=frozenset(map(rename, plan.low_variables)),
        unmatched=tuple(new for pattern in plan.unmatched for new in excluded.get(pattern, ())),
        blocks=tuple(blocks),
    )


def _renamed_pattern(pattern: str, names: Iterable[str], rename: Callable[[str], str]) -> list[str]:
    """Return patterns for the new names of what ``pattern`` matches: one pattern, or these names one by one."""
    new = re.sub("_$", "", rename(pattern + "_"))
    before, after = pattern_of(pattern), pattern_of(new)
    if all(bool(before.match(name)) == bool(after.match(rename(name + "_")[:-1])) for name in names):
        return [new]
    return [escape(rename(name + "_")[:-1]) for name in names if before.match(name)]
