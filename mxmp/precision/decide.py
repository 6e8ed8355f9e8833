"""The plan by the rules: what is safe under a policy, with the kernels of a device."""

from __future__ import annotations

from types import MappingProxyType
from typing import Collection, Iterator, Mapping

from ..policy import Policy, pattern_of
from . import _mxnet
from .graph import Entry, Graph, Node
from .plan import Decision, Plan, rule_under
from .rules import RULES, Kind, Rule, missing_kernel
from .subgraphs import Body, bodies

__all__ = ["check_policy", "decide", "may_compute_low"]

# Symbol JSON writes a variable's dtype as MXNet's type code (mshadow/base.h), an operator's as a name.
_FLOAT32 = ("0", "float32", "None", "-1")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_UNDECIDED: Mapping[str, Decision] = MappingProxyType({})
_DENSE = ("0", "-1", "default")
# Slots that hold trainable weights where no one says which variables are parameters.
_WEIGHT_SLOTS = {
    "Convolution": (1, 2),
    "Deconvolution": (1, 2),
    "FullyConnected": (1, 2),
    "RNN": (1,),
}

# Operators that make as many channels as their first input has.
_KEEP_CHANNELS = frozenset(
    ["Activation", "BatchNorm", "Dropout", "LeakyReLU", "Pooling", "clip", "elemwise_add", "relu"]
)


def check_policy(policy: Policy, device: str) -> None:
    """Raise ``ValueError`` where a policy names what MXNet or the device does not have."""
    if policy.compute == "bfloat16" and device == "gpu":
        raise ValueError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' there, or run bfloat16 on the CPU"
        )
    for name in ("low_ops", "full_ops"):
        for op in getattr(policy, name):
            if op not in RULES and not _mxnet.has_operator(op):
                raise ValueError(f"Policy({name}=[{op!r}]): MXNet has no operator {op!r}")
            rule = RULES.get(op)
            if rule and name == "low_ops" and rule.kind in (Kind.HEAD, Kind.ALONE):
                raise ValueError(f"Policy(low_ops=[{op!r}]): {op} cannot run in {policy.compute}: {rule.reason}")


def decide(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    stored_low: Collection[str] = (),
    keep_output_names: bool = False,
    non_fp32: Mapping[str, str] = _NOTHING,
    decided: Mapping[str, Decision] = _UNDECIDED,
) -> Plan:
    """Plan a graph by the rules, in one pass from inputs to outputs.

    Parameters
    ----------
    graph : Graph
        In FP32, without casts of ours.
    policy : Policy
    device : {"cpu", "gpu"}
        Whose kernels the graph will meet.
    parameters : collection of str, optional
        Names of the variables that are parameters. Without it, those in the weight and bias slots
        of matrix operators are.
    stored_low : collection of str
        Names of variables that are stored in low precision already, because another graph decided so.
    keep_output_names : bool
        Keep heads with several outputs in FP32: a cast cannot carry their output names.
    non_fp32 : mapping of str to str
        Variables that hold no dense FP32 tensor although the graph does not declare it, with the reason.
    decided : mapping of str to Decision
        Decisions made elsewhere, by node name. A decision holds for operators of that name and type that nothing keeps
        from the graph's dtypes.

    Raises
    ------
    ValueError
        Where the policy cannot hold on the device, or the graph has an operator without a rule.
    """
    check_policy(policy, device)
    names = graph.names()
    excluded = _Patterns(policy.exclude)
    draft = _Draft(policy, device, non_fp32)
    for node, rule, fixed in _operators(graph, draft, excluded, keep_output_names):
        given = decided.get(names[node])
        if fixed:
            decision = Decision(node.op, False, fixed)
        elif given is not None and given.op == node.op:
            decision = given
        else:
            decision = Decision(node.op, *draft.by_rule(node, rule))
        draft.rules[node], draft.decisions[node] = rule, decision
    draft.settle(graph, by_plan=bool(decided))
    decisions: dict[str, Decision] = {}
    unmatched = set(excluded.unmatched())
    for node, decision in draft.decisions.items():
        decisions[names[node]] = decision
        for body in bodies(node):
            fixed = excluded.match(node.name) or (_STEERS if body.steers else "")
            prefix = body.prefix(names[node])
            within = {name[len(prefix) :]: d for name, d in decided.items() if name.startswith(prefix)}
            inner = _decide_body(body, policy, device, draft, fixed, within)
            decisions.update({prefix + name: d for name, d in inner.decisions.items()})
            unmatched.intersection_update(inner.unmatched)
    low_variables: set[Node] = set()
    if policy.stores_low(device):
        low_variables = _low_variables(graph, draft, parameters)
        low_variables |= {n for n in names if n.is_variable and n.name in stored_low}
    return Plan(
        policy,
        device,
        decisions,
        frozenset(names[n] for n in low_variables),
        tuple(p for p in policy.exclude if p in unmatched),
    )


_STEERS = "it decides which way the program goes, or how often: rounding would change that"


def may_compute_low(
    graph: Graph, policy: Policy, device: str, *, keep_output_names: bool = False, slow_too: bool = False
) -> dict[Node, tuple[Kind, Rule]]:
    """The operators that nothing keeps in FP32, whatever their neighbours compute in: ``LOW`` or ``FOLLOW``.

    ``slow_too``: see ``missing_kernel``.
    """
    draft = _Draft(policy, device, _NOTHING)
    found: dict[Node, tuple[Kind, Rule]] = {}
    for node, rule, fixed in _operators(graph, draft, _Patterns(policy.exclude), keep_output_names):
        kind, _ = draft.kind(node, rule, slow_too)
        if not fixed and kind in (Kind.LOW, Kind.FOLLOW):
            found[node] = kind, rule
    return found


def _operators(
    graph: Graph, draft: _Draft, excluded: _Patterns, keep_output_names: bool
) -> Iterator[tuple[Node, Rule, str]]:
    """Every operator with its rule, and what keeps it in FP32 whatever that says."""
    heads = {entry.node for entry in graph.heads if entry.index > 0} if keep_output_names else set()
    for node in graph.nodes():
        unwanted = excluded.match(node.name)
        draft.note_channels(node)
        rule = None if node.is_variable else rule_under(draft.policy, node.op)
        fixed = draft.note_non_fp32(node, rule) or unwanted
        if node in heads:
            fixed = fixed or "a head with several outputs keeps its names only without casts"
        if rule is not None:
            yield node, rule, fixed


def _decide_body(
    body: Body, policy: Policy, device: str, draft: _Draft, fixed: str, decided: Mapping[str, Decision]
) -> Plan:
    """The plan of a body. Its variables are FP32, unless they get what is not; its parameters are stored as such."""
    non_fp32 = {v.name: draft.non_fp32[e.node] for v, e in body.outer.items() if e.node in draft.non_fp32}
    plan = decide(body.graph, policy, device, parameters=(), non_fp32=non_fp32, decided=decided)
    if not fixed:
        return plan
    decisions = {name: Decision(d.op, False, fixed) for name, d in plan.decisions.items()}
    return Plan(policy, device, decisions, unmatched=plan.unmatched)


class _Draft:
    """Decisions so far, for the operators whose inputs are all decided."""

    def __init__(self, policy: Policy, device: str, non_fp32: Mapping[str, str]) -> None:
        self._non_fp32_inputs = non_fp32
        self.policy = policy
        self._device = device
        self.rules: dict[Node, Rule] = {}
        self.decisions: dict[Node, Decision] = {}
        self.non_fp32: dict[Node, str] = {}
        self._channels: dict[Entry, int] = {}
        # What may be read in either dtype: the first output of norms and the like, and followers of nothing else.
        self._normalized: set[Node] = set()
        self._undecided: dict[Node, None] = {}

    def by_rule(self, node: Node, rule: Rule) -> tuple[bool, str]:
        """Return whether a node that nothing else fixes computes in low precision, and why."""
        kind, reason = self.kind(node, rule)
        if kind is Kind.FOLLOW:
            unread = (*rule.keep, *rule.params)
            read = [entry for position, entry in enumerate(node.inputs) if position not in unread]
            if not read:
                return False, reason
            if not all(self._is_low(entry) or self._is_either(entry) for entry in read):
                return False, "follows its inputs, and one of them is FP32"
            if not any(map(self._is_low, read)):
                self._undecided[node] = None
        elif rule.normalized and self.policy.compute == "float16" and node.op not in self.policy.full_ops:
            # bfloat16's 8 bits are too few for the sums of residual networks, which are FP32 where a norm's output is.
            self._normalized.add(node)
        return kind in (Kind.LOW, Kind.FOLLOW), reason

    def settle(self, graph: Graph, by_plan: bool) -> None:
        """Decide the operators that follow nothing but norms: they compute low where one of their readers does.

        ``by_plan``: a plan decides instead, and names those that do.
        """
        readers: dict[Node, list[tuple[Node, int]]] = {}
        for entry, users in graph.consumers().items() if self._undecided else ():
            readers.setdefault(entry.node, []).extend(users)
        for node in reversed(list(self._undecided)):
            if by_plan or not any(self.wants_low(*reader) for reader in readers.get(node, ())):
                why = "follows a norm, and nothing that reads it computes low"
                self.decisions[node] = Decision(node.op, False, why)

    def kind(self, node: Node, rule: Rule, slow_too: bool = False) -> tuple[Kind, str]:
        """``LOW`` or ``FOLLOW`` where the policy and the device's kernels let a node compute low, and why."""
        kind, reason = rule.resolve(node.attrs, self.policy.compute)
        if node.op in self.policy.full_ops:
            return Kind.FULL, "named in the policy's full_ops"
        if node.op in self.policy.low_ops:
            kind, reason = Kind.LOW, "named in the policy's low_ops"
        if kind is Kind.NORM and self.policy.norm == "compute":
            kind = Kind.FOLLOW
        if kind in (Kind.LOW, Kind.FOLLOW):
            channels = self._channels.get(node.inputs[0]) if node.inputs else None
            missing = missing_kernel(
                node.op, node.attrs, self.policy.compute, self._device, channels=channels, slow_too=slow_too
            )
            if missing:
                return Kind.FULL, missing
        return kind, reason

    def _is_low(self, entry: Entry) -> bool:
        return entry.node not in self._undecided and self._hands_on_low(entry)

    def _is_either(self, entry: Entry) -> bool:
        if entry.node in self._normalized:
            return entry.index == 0
        return entry.node in self._undecided and self._hands_on_low(entry)

    def _hands_on_low(self, entry: Entry) -> bool:
        decision = self.decisions.get(entry.node)
        return decision is not None and decision.low and entry.index not in self.rules[entry.node].keep_outputs

    def wants_low(self, node: Node, position: int) -> bool:
        """Return whether a decided node reads its input at ``position`` in the compute dtype."""
        return self.decisions[node].low and position not in self.rules[node].keep

    def note_channels(self, node: Node) -> None:
        """Record how many channels a node makes, where the convolutions before it say so."""
        found: int | None = None
        if node.op == "Convolution":
            found = int(node.attrs["num_filter"])
        elif node.op == "Concat" and node.attrs.get("dim", "1") == "1":
            sizes = [self._channels.get(entry) for entry in node.inputs]
            found = sum(filter(None, sizes)) if all(sizes) else None
        elif node.op in _KEEP_CHANNELS:
            found = self._channels.get(node.inputs[0])
        if found is not None:
            self._channels[Entry(node)] = found

    def note_non_fp32(self, node: Node, rule: Rule | None) -> str:
        """Record why a node's outputs are no dense FP32 tensors that may be cast; an empty string if they are."""
        reason = self._non_fp32_reason(node, rule)
        if reason:
            self.non_fp32[node] = reason
        return reason

    def _non_fp32_reason(self, node: Node, rule: Rule | None) -> str:
        attrs = node.attrs
        dtype = attrs.get("__dtype__") if rule is None else attrs.get("dtype")
        if dtype is not None and dtype not in _FLOAT32:
            return f"the graph asks for dtype {dtype} here"
        storage = attrs.get("__storage_type__", attrs.get("stype", "0"))
        if storage not in _DENSE:
            return "sparse storage"
        if rule is None:
            return self._non_fp32_inputs.get(node.name, "")
        if dtype is not None:
            return ""
        for position, entry in enumerate(node.inputs):
            if position not in rule.keep and entry.node in self.non_fp32:
                return self.non_fp32[entry.node]
        return ""


def _low_variables(graph: Graph, draft: _Draft, parameters: Collection[str] | None) -> set[Node]:
    """Variables that only low-precision operators read, and all of them in the compute dtype."""
    heads = {entry.node for entry in graph.heads}
    low = set()
    for entry, users in graph.consumers().items():
        variable = entry.node
        if not variable.is_variable or variable in draft.non_fp32 or variable in heads:
            continue
        if all(draft.wants_low(node, position) for node, position in users) and (
            variable.name in parameters
            if parameters is not None
            else all(position in _WEIGHT_SLOTS.get(node.op, ()) for node, position in users)
        ):
            low.add(variable)
    return low


class _Patterns:
    """The policy's ``exclude``: a pattern names nodes, or a block and thereby all that it contains."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._compiled = [(p, pattern_of(p)) for p in patterns]
        self._matched: set[str] = set()

    def match(self, name: str) -> str:
        """Return why ``name`` is excluded, or an empty string."""
        found = [pattern for pattern, compiled in self._compiled if compiled.match(name)]
        self._matched.update(found)
        return f"excluded by {found[0]!r}" if found else ""

    def unmatched(self) -> tuple[str, ...]:
        return tuple(p for p, _ in self._compiled if p not in self._matched)
