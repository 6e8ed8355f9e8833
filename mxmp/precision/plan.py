"""A precision plan: a decision for every operator of a graph, by node name, as plain data.

A plan can be saved, read by a person, compared with another and used in another process: the same graph and the same
plan give the same low-precision graph.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Collection, Iterable, Iterator, Mapping

from ..policy import Policy, as_policy, is_policy_text
from . import safe_sums
from .graph import Entry, Graph, Node
from .rule import Kind, Rule
from .rules import RULES, rule_under
from .subgraphs import Body, bodies
from .tuned import Tuned

FULL = "float32"
_NO_MATRIX = "it has no matrix operator (convolution, dense layer, dot, recurrent layer) that may"


@dataclass(frozen=True)
class Decision:
    """Whether an operator computes in low precision, and why.

    ``op`` is the operator's name in Symbol JSON, ``"Convolution"``. ``low`` is True for the compute dtype of the plan's
    policy, False for FP32. ``reason`` is one line, which ``explain`` shows to the user.
    """

    op: str
    low: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """Which operators of one graph compute in low precision, and which parameters are stored in float16.

    Attributes
    ----------
    policy : Policy
        The policy for which the decisions were made.
    device : {"cpu", "gpu"}
        The device for whose kernels the decisions were made. The plan cannot be used on the other one.
    decisions : mapping of str to Decision
        The decision for every operator of the graph, by the operator's name and in graph order. Of two operators with
        one name the second is ``"name:1"``. For an operator in a body of control flow, the name begins with
        ``Body.prefix``: ``"loop/fc"`` in a loop's body, ``"a/then/fc"`` in a branch of the ``cond`` ``"a"``.
    low_variables : frozenset of str
        Names of the parameters that are stored in float16, with FP32 master weights. In the plan of a body: see
        ``within``.
    unmatched : tuple of str
        Patterns of ``policy.exclude`` that match no node of the graph; perhaps they are misspelt.
    tuned : Tuned or None
        What ``mxmp.tune`` compared and measured to find the plan; None if tuning did not make it.
    blocks : tuple of str
        For a Gluon net, the name prefixes of its blocks, outermost first: ``("net0_", "net0_dense0_")``. With them the
        plan can be used for a net of the same code whose blocks have other numbers. Empty for a Symbol.

    Examples
    --------
    >>> out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    >>> module = mxmp.Module(out, label_names=None, policy="float16")
    >>> module.bind([("data", (8, 4))])
    >>> module.plan.decisions["fc"].low
    True
    >>> module.plan.save("fc-plan.json")
    >>> module = mxmp.Module(out, label_names=None, policy=mxmp.Plan.load("fc-plan.json"))
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
        """Return how many operators compute in low precision, those in loops and branches included."""
        return sum(d.low for d in self.decisions.values())

    @property
    def avoids_slow_kernels(self) -> bool:
        """Return whether a graph that follows this plan also gets the workarounds that change nothing but its speed.

        It does if an operator computes in low precision, or if ``mxmp.tune`` measured that they make the FP32 graph
        faster. Otherwise it gets only those without which it fails or gives wrong numbers.
        """
        return self.num_low > 0 or (self.tuned is not None and self.tuned.converts)

    def within(self, body: Body, name: str) -> Plan:
        """Return the plan of ``body``, a body of the control-flow operator ``name``: the part of this plan about it.

        An operator ``"loop/fc"`` of this plan is ``"fc"`` there. The policy has ``output="float32"``, as a body returns
        FP32. ``low_variables`` has the body's variables that a ``foreach`` reads in float16, such as weights; for
        another operator, or in bfloat16, it is empty.
        """
        prefix = body.prefix(name)
        own = {prefix + inner for inner in body.graph.names().values()}
        decisions = {
            key[len(prefix) :]: decision
            for key, decision in self.decisions.items()
            if key.startswith(prefix) and (key in own or not own.isdisjoint(_parents(key)))
        }
        plan = Plan(replace(self.policy, output="float32"), self.device, decisions)
        if self.policy.compute != "float16" or not body.castable:
            return plan
        planned = PlannedGraph(body.graph, plan)
        return replace(plan, low_variables=frozenset(map(planned.names.__getitem__, planned.castable_low(body))))

    def differences(self, other: Plan) -> dict[str, tuple[Decision | None, Decision | None]]:
        """Return the operators that only one of two plans has, or that compute in low precision in one of them only.

        Returns
        -------
        dict of str to (Decision or None, Decision or None)
            From the operator's name to its decision in this plan and to that in ``other``; None where the plan does not
            have the operator.
        """
        names = dict.fromkeys([*self.decisions, *other.decisions])
        pairs = {name: (self.decisions.get(name), other.decisions.get(name)) for name in names}
        return {name: (a, b) for name, (a, b) in pairs.items() if a is None or b is None or a.low != b.low}

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to a JSON file, which ``load`` reads.

        Raises
        ------
        OSError
            The file cannot be written. An older file of this name is then unchanged.
        """
        from .plan_file import write

        write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Return the plan that ``save`` wrote to a file.

        Raises
        ------
        ValueError
            The file holds no plan; the message says what is wrong with it.
        OSError
            The file cannot be read.
        """
        from .plan_file import read

        return cls._of(read(path))

    def to_json(self) -> str:
        """Return the plan as JSON text, with one line for each operator: its name, type, dtype and reason."""
        from .plan_file import text_of

        return text_of(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote as ``text``; raises ``ValueError`` for any other text."""
        from .plan_file import parsed

        return cls._of(parsed(text))

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Plan:
        decisions = {name: Decision(*each) for name, each in fields["decisions"].items()}
        return cls(**{**fields, "decisions": decisions})

    def __str__(self) -> str:
        """Return a summary: how many operators compute in low precision, what tuning measured, what is FP32 and why."""
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

    def __hash__(self) -> int:
        # The hash that ``dataclass`` makes would fail at ``decisions``, a dict.
        return hash((self.policy, self.device, frozenset(self.decisions.items())))


@dataclass(eq=False)
class DecidedGraph:
    """A decision for each operator of an FP32 graph, looked up by node, without those in bodies of control flow."""

    policy: Policy
    rules: Mapping[Node, Rule]
    decisions: dict[Node, Decision]
    low_inputs: Mapping[Node, set[int]]  # what control flow reads in float16
    low_variables: Collection[Node] = ()

    def is_low(self, entry: Entry) -> bool:
        """Return whether the tensor ``entry`` of the FP32 graph is in low precision."""
        if entry.node.is_variable:
            return entry.node in self.low_variables
        return self.decisions[entry.node].low and entry.index not in self.rules[entry.node].keep_outputs

    def wants_low(self, node: Node, position: int) -> bool:
        """Return whether ``node`` reads its input at ``position`` in low precision, perhaps behind a cast."""
        if node in self.low_inputs:
            return position in self.low_inputs[node]
        if not self.decisions[node].low or position in self.rules[node].keep:
            return False
        return not self.reads_fp32(node)

    def castable_low(self, body: Body) -> set[Node]:
        """Return the variables of ``body``, of whose graph this is, that a ``foreach`` reads in float16, as all do."""
        # A cast in the body would run in each iteration, and each copy be kept for the backward. But MXNet sums the
        # gradients of a weight that is cast outside in low precision, as if the loop were unrolled. In bfloat16 such a
        # sum stops growing after 256 equal terms, so weights are cast in the body.
        if self.policy.compute != "float16":
            return set()
        heads, readers = {entry.node for entry in body.graph.heads}, body.graph.consumers()
        read = {variable: readers.get(Entry(variable), ()) for variable in body.castable - heads}
        return {variable for variable, users in read.items() if users and all(self.wants_low(*user) for user in users)}

    def reads_fp32(self, node: Node) -> bool:
        """Return whether the float16 ``node`` reads FP32 as it comes, and writes float16."""
        return self.decisions[node].low and self.reads_either(node) and not self.is_low(node.inputs[0])

    def reads_either(self, node: Node) -> bool:
        """Return whether ``node`` in float16 may read FP32 too, as a softmax under a mask."""
        # ``low_ops`` names what is to read the compute dtype.
        policy = self.policy
        return self.rules[node].reads_either and policy.compute == "float16" and node.op not in policy.low_ops


class PlannedGraph(DecidedGraph):
    """An FP32 graph with its plan; ``ValueError`` if the plan does not fit, or as ``rule_under``."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.names = names = graph.names()  # the keys of ``plan.decisions``
        check_fit(names, plan)
        decisions = {n: plan.decisions[name] for n, name in names.items() if not n.is_variable}
        loops = [n for n in decisions if n.subgraphs]
        self.within = {n: [(body, plan.within(body, names[n])) for body in bodies(n)] for n in loops}
        super().__init__(
            plan.policy,
            {n: rule_under(plan.policy, n.op) for n in decisions},
            decisions,
            {n: low_inputs(within) for n, within in self.within.items()},
            {n for n, name in names.items() if n.is_variable and name in plan.low_variables},
        )


def low_inputs(within: Iterable[tuple[Body, Plan]]) -> set[int]:
    """Return the positions of the inputs that a control-flow operator reads in float16; see ``Plan.within``."""
    found: set[int] = set()
    for body, plan in within:
        names = body.graph.names()
        found.update(at for variable, at in body.positions.items() if names[variable] in plan.low_variables)
    return found


def read_policy(policy: str | os.PathLike | Policy | Plan, exclude: Iterable[str] = ()) -> tuple[Policy, Plan | None]:
    """Return the Policy and, if it means one, the Plan that a user's ``policy`` argument means: a text, path or object.
    Raises ``ValueError`` for anything else or ``exclude`` beside a plan, ``OSError`` for a file that cannot be read."""
    if isinstance(policy, os.PathLike) or (
        isinstance(policy, str) and not is_policy_text(policy) and (policy.endswith(".json") or os.path.isfile(policy))
    ):
        policy = Plan.load(os.fspath(policy))
    if not isinstance(policy, Plan):
        return as_policy(policy, exclude), None
    if list(exclude):
        raise ValueError("exclude is part of the policy that a Plan was made for: make the Plan with it")
    return policy.policy, policy


def summed_in_fp32(plan: Plan) -> Plan:
    """Return ``plan`` with softmax and LayerNorm in FP32 if they would sum in float16 in this process."""
    unsafe = {op for op, rule in RULES.items() if rule.sums_safely}.difference(plan.policy.low_ops)
    found = {name: decision for name, decision in plan.decisions.items() if decision.low and decision.op in unsafe}
    if plan.policy.compute != "float16" or safe_sums.is_set() or not found:
        return plan
    why = f"the plan has it in float16, as it was made with {safe_sums.VARIABLE}=1, which is not set here"
    in_fp32 = {name: Decision(decision.op, False, why) for name, decision in found.items()}
    return replace(plan, decisions={**plan.decisions, **in_fp32})


def why_nothing_low(*plans: Plan) -> str:
    """Return why graphs whose plans have nothing in low precision have not, for a message."""
    decided = ((plan.policy, d) for plan in plans for d in plan.decisions.values())
    matrices = (d.reason for policy, d in decided if rule_under(policy, d.op).kind is Kind.LOW)
    reasons = list(dict.fromkeys(matrices))[:3]
    return f"its matrix operators stay in FP32 ({'; '.join(reasons)})" if reasons else _NO_MATRIX


def without_effect(plan: Plan) -> dict[str, str]:
    """Return why each of the policy's ``low_ops`` and ``full_ops`` that changes nothing in the graph does not, such as
    ``{"low_ops=softmax": "the graph has none"}``, or that the device has no kernel for it in the compute dtype."""
    of_type: dict[str, list[Decision]] = {}
    for decision in plan.decisions.values():
        of_type.setdefault(decision.op, []).append(decision)
    fields = (("low_ops", plan.policy.low_ops), ("full_ops", plan.policy.full_ops))
    idle = {f"{field}={op}": "the graph has none" for field, ops in fields for op in ops if op not in of_type}
    for op in plan.policy.low_ops:
        if op in of_type and not any(decision.low for decision in of_type[op]):
            idle[f"low_ops={op}"] = f"it stays in FP32, as {of_type[op][0].reason}"
    return idle


def message_of_idle(idle: Mapping[str, str]) -> str:
    """Return the warning about what ``without_effect`` has found."""
    return f"entries of the policy that change nothing: {'; '.join(f'{entry} ({why})' for entry, why in idle.items())}"


def _parents(name: str) -> Iterator[str]:
    """Yield what stands before each slash in ``name``: ``"a"`` and ``"a/b"`` for ``"a/b/c"``."""
    return (name[:i] for i, letter in enumerate(name) if letter == "/")


def _operators(names: Mapping[Node, str], prefix: str = "") -> dict[str, str]:
    """Return the type of each operator by name, those in bodies included; ``prefix`` begins each name."""
    found = {}
    for node, name in names.items():
        if not node.is_variable:
            found[prefix + name] = node.op
            for body in bodies(node) if node.subgraphs else ():
                found.update(_operators(body.graph.names(), prefix + body.prefix(name)))
    return found


def decisions_about(names: Mapping[Node, str], plan: Plan) -> dict[str, Decision]:
    """Return the decisions of ``plan``, less those about an operator of another type than the graph has by this name;
    ``names`` are of ``Graph.names``."""
    operators = _operators(names)
    return {name: each for name, each in plan.decisions.items() if operators.get(name, each.op) == each.op}


def check_fit(names: Mapping[Node, str], plan: Plan) -> None:
    """Raise ``ValueError`` unless the plan has exactly a graph's operators; ``names`` are of ``Graph.names``."""
    operators = _operators(names)
    planned: dict[str, Any] = {name: decision.op for name, decision in plan.decisions.items()}
    if operators == planned:
        return
    missing: list = sorted(operators.items() - planned.items())
    extra: list = sorted(planned.items() - operators.items())
    hint = ""
    mine, theirs = Counter(operators.values()), Counter(planned.values())
    if operators.keys().isdisjoint(planned) and mine != theirs:
        # Of nets with other prefixes every name differs, which says nothing: the types do.
        missing, extra = (sorted(f"{n} {op}" for op, n in each.items()) for each in (mine - theirs, theirs - mine))
        hint = ". No name is in both, so these are counted by type"
    if sorted(operators.values()) == sorted(planned.values()):
        hint = (
            ". The types are the same, so perhaps only names differ: build the network with those that the plan has, "
            "by prefix= or name=, or a Symbol's within `with mx.name.NameManager():`, which numbers from 0"
        )
    raise ValueError(
        f"the plan is of another graph: it has {len(planned)} operators, the graph {len(operators)}; "
        f"only in the graph: {missing[:3] or 'none'}; only in the plan: {extra[:3] or 'none'}{hint}"
    )
