"""Makes the plan of a graph by the rules: each operator computes in what is safe, if the device has a kernel for it.

``_Draft.by_rule`` decides from the inputs to the outputs, ``_Draft.settle`` then for what depends on its readers, and
``readers.raised`` keeps in FP32 what an FP32 reader needs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Collection, Iterable, Iterator, Mapping

import mxnet as mx

from ..policy import Policy, pattern_of
from . import _mxnet, safe_sums
from .graph import TYPE_CODES, Entry, Graph, Node, output_shapes
from .plan import Decision, Plan, low_inputs, rule_under
from .readers import deciding_inputs, is_square, raised
from .rules import RULES, Kind, Rule, leaves_cudnn, missing_kernel
from .subgraphs import Body, bodies

# A variable's dtype is a code, an operator's a name.
_FLOAT32 = (TYPE_CODES["float32"], "float32", "None", "-1")
_NAMES = {code: name for name, code in TYPE_CODES.items()}
_NOTHING: Mapping[str, str] = MappingProxyType({})
_UNDECIDED: Mapping[str, Decision] = MappingProxyType({})
# The ``training_shapes`` of a graph for inference, or whose inputs have shapes that are not known.
NO_SHAPES: Mapping[str, tuple] = MappingProxyType({})
_DENSE = ("0", "-1", "default")
# Reasons why a variable is cast nowhere: mxmp's cast would go through dense storage, forward or backward.
SPARSE = "its storage is sparse, and mxmp casts dense arrays only"
SPARSE_GRADIENT = "it reads a parameter with a row-sparse gradient, which the gradient of a cast would make dense"
# Operators that return dense arrays whatever the storage of their inputs is; many others keep it. See also ``dot``.
_RETURN_DENSE = {
    *("FullyConnected", "Embedding", "take", "sum", "mean", "norm", "_square_sum", "Activation", "Dropout", "Reshape"),
    *("Flatten", "transpose", "softmax", "log_softmax", "broadcast_add", "broadcast_sub"),
}
# Positions of the inputs that are taken for parameters where the caller does not say which variables are.
_WEIGHT_SLOTS = {
    "Convolution": (1, 2),
    "Deconvolution": (1, 2),
    "FullyConnected": (1, 2),
    "RNN": (1,),
}

# Operators whose first output has as many channels as their first input.
_KEEP_CHANNELS = frozenset(
    ["Activation", "BatchNorm", "Dropout", "LeakyReLU", "Pooling", "clip", "elemwise_add", "relu"]
)


def check_policy(policy: Policy, device: str, operators: Collection[str] = ()) -> None:
    """Raise ``ValueError`` if MXNet cannot compute on ``device`` (``"cpu"`` or ``"gpu"``) what ``policy`` says."""
    if policy.compute == "bfloat16" and device == "gpu":
        raise ValueError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' there, or run bfloat16 on the CPU"
        )
    for name in ("low_ops", "full_ops"):
        for op in getattr(policy, name):
            own = _mxnet.name_in_graphs(op)
            # ``operators``, of a graph, may be of an mx.library, which a process that measures has not loaded.
            if not own and op not in RULES and op not in operators:
                raise ValueError(f"Policy({name}=[{op!r}]): MXNet has no operator {op!r}")
            if own not in ("", op):
                raise ValueError(f"Policy({name}=[{op!r}]): in graphs MXNet calls this operator {own!r}: use that name")
            rule = RULES.get(op)
            if rule and name == "low_ops" and rule.kind in (Kind.HEAD, Kind.ALONE):
                raise ValueError(f"Policy(low_ops=[{op!r}]): {op} cannot run in {policy.compute}: {rule.reason}")


def decide(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    parameters: Collection[str] | None = None,  # may be stored in float16; None: see ``_WEIGHT_SLOTS``
    stored_low: Collection[str] = (),  # parameters that another graph of the network stores in float16 already
    keep_output_names: bool = False,  # FP32 for an operator whose graph outputs a cast would rename
    non_fp32: Mapping[str, str] = _NOTHING,  # why a variable is no dense FP32 array, where the graph does not say it
    decided: Mapping[str, Decision] = _UNDECIDED,  # of another plan: they overrule rules and missing kernels
    training_shapes: Mapping[str, tuple] = NO_SHAPES,  # of the inputs; empty for inference too
    exported: bool = False,  # to run elsewhere: MXNET_SAFE_ACCUMULATION does not count
    learned: Collection[str] | None = None,  # all parameters but constants; None: inputs may be features
    is_body: bool = False,
    any_kernel: bool = False,  # as if the device had every kernel, except in bodies
) -> Plan:
    """Return the plan of an FP32 graph by the rules: whether each operator computes in low precision, and why.
    Raises ``ValueError`` if ``check_policy`` refuses the policy, or ``rule_under`` an operator."""
    names = graph.names()
    check_policy(policy, device, {node.op for node in names})
    storable = {*(parameters or ()), *stored_low} if policy.stores_low(device) else ()
    draft = _Draft(policy, device, non_fp32, storable, exported=exported, learned=learned, any_kernel=any_kernel)
    if policy.compute == "bfloat16" and training_shapes:
        draft.data_shapes = _shapes_of_products(graph, training_shapes)
    for node, rule, fixed in _operators(graph, draft, keep_output_names):
        given = decided.get(names[node])
        if fixed:
            decision = Decision(node.op, False, fixed)
        elif given is not None and given.op == node.op:
            decision = given
        else:
            decision = Decision(node.op, *draft.by_rule(node, rule))
        draft.rules[node], draft.decisions[node] = rule, decision
    inner: dict[Node, dict[str, Decision]] = {}
    unmatched = {p for p in policy.exclude if not any(draft.patterns[p].match(node.name) for node in names)}
    for node in filter(lambda node: node.subgraphs, draft.decisions):
        inner[node] = {}
        for body in bodies(node):
            fixed = draft.excluded(node.name) or (_STEERS if body.steers else "")
            prefix = body.prefix(names[node])
            within = {name[len(prefix) :]: d for name, d in decided.items() if name.startswith(prefix)}
            found = _decide_body(node, body, policy, device, draft, fixed, within)
            inner[node].update({prefix + name: d for name, d in found.decisions.items()})
            unmatched.intersection_update(found.unmatched)
        plan = Plan(policy, device, inner[node])
        draft.low_inputs[node] = low_inputs((body, plan.within(body, names[node])) for body in bodies(node))
    draft.settle(graph, by_plan=bool(decided))
    for node, why in raised(graph, draft, is_body=is_body).items():
        draft.decisions[node] = Decision(node.op, False, why)
    decisions: dict[str, Decision] = {}
    for node, decision in draft.decisions.items():
        decisions.update({names[node]: decision, **inner.get(node, {})})
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


_STEERS = "it computes the condition of a loop or branch, which rounding could change"


def may_compute_low(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    learned: Collection[str] | None = None,
    keep_output_names: bool = False,
    slow_too: bool = False,
) -> dict[Node, Kind]:
    """Return the operators that a plan may have in low precision and round nothing that the rules would not round.
    Each has its kind, ``LOW`` or ``FOLLOW``. Without ``slow_too``, none has a kernel that is slower than FP32's."""
    decisions = decide(
        *(graph, policy, device),
        parameters=parameters,
        learned=learned,
        keep_output_names=keep_output_names,
        any_kernel=True,
    ).decisions
    names, heads = graph.names(), {entry.node for entry in graph.heads}
    low = {node for node, name in names.items() if not node.is_variable and decisions[name].low}
    draft = _Draft(policy, device, _NOTHING, slow_too=slow_too)
    found: dict[Node, Kind] = {}
    for node, rule, fixed in _operators(graph, draft, keep_output_names):
        draft.rules[node] = rule
        kind, _ = draft.kind(node, rule)
        if not fixed and kind in (Kind.LOW, Kind.FOLLOW):
            found[node] = kind
    low.intersection_update(found)
    readers = graph.readers()
    for node in reversed(list(found)):
        users = readers.get(node, [])
        # What only moves values, in front of these: rounding before it gives what rounding behind it gives.
        moves = draft.rules[node].exact and users and node not in heads
        if moves and all(user in low and position not in draft.rules[user].keep for user, position in users):
            low.add(node)
    return {node: kind for node, kind in found.items() if node in low}


def _operators(graph: Graph, draft: _Draft, keep_output_names: bool) -> Iterator[tuple[Node, Rule, str]]:
    """Yield each operator, its rule, and a reason to keep it in FP32 whatever the rule says, or ``""``.
    Record in ``draft`` which outputs are no dense FP32 arrays, how many channels they have, and what is learned."""
    heads = {entry.node for entry in graph.heads if keep_output_names and _has_several_outputs(entry, graph)}
    for node in graph.nodes():
        draft.note_channels(node)
        draft.note_learned(node)
        rule = None if node.is_variable else rule_under(draft.policy, node.op)
        fixed = draft.non_fp32_reason(node, rule)
        if fixed and not draft.returns_dense(node, fixed):
            draft.non_fp32[node] = fixed
        fixed = fixed or draft.excluded(node.name)
        if node in heads:
            fixed = fixed or "casts would rename the graph outputs that it makes, because it has several"
        if rule is not None:
            yield node, rule, fixed


def _has_several_outputs(head: Entry, graph: Graph) -> bool:
    """Return whether MXNet numbers the outputs of the operator that makes ``head``, as in ``"split_output0"``."""
    node = head.node
    # Custom operators and control flow never compute in low precision: no cast renames their outputs.
    if head.index or node.is_variable or node.op == "Custom" or node.subgraphs:
        return head.index > 0
    inputs = [Entry(Node("null", f"input{position}")) for position in range(len(node.inputs))]
    alone = Graph([Entry(Node(node.op, node.name, node.attrs, inputs))], graph.attrs)
    return alone.to_symbol().list_outputs() != [f"{node.name}_output"]


def _decide_body(
    node: Node, body: Body, policy: Policy, device: str, draft: _Draft, fixed: str, decided: Mapping[str, Decision]
) -> Plan:
    """Return the plan of a body of ``node``, with names as in the body; all is FP32 if ``fixed`` is a reason.
    ``draft`` is that of the graph around the body; ``decided`` has another plan's decisions for the body."""
    outer = {variable.name: node.inputs[position].node for variable, position in body.positions.items()}
    non_fp32 = {name: draft.non_fp32[source] for name, source in outer.items() if source in draft.non_fp32}
    plan = decide(
        *(body.graph, policy, device),
        parameters=(),
        non_fp32=non_fp32,
        decided=decided,
        exported=draft.exported,
        is_body=True,
    )
    if not fixed:
        return plan
    decisions = {name: Decision(d.op, False, fixed) for name, d in plan.decisions.items()}
    return Plan(policy, device, decisions, unmatched=plan.unmatched)


class _Draft:
    """The plan of one graph while ``decide`` makes it; the constructor's arguments are those of ``decide``."""

    def __init__(
        self,
        policy: Policy,
        device: str,
        non_fp32: Mapping[str, str],
        storable: Collection[str] = (),  # parameters that may be stored in float16, or are already
        *,
        exported: bool = False,
        learned: Collection[str] | None = None,
        slow_too: bool = False,
        any_kernel: bool = False,
    ) -> None:
        self._slow_too = slow_too
        self._any_kernel = any_kernel
        self._learned_names = learned or None
        self._learned: set[Node] = set()
        self._non_fp32_inputs = non_fp32
        self._storable = frozenset(storable)
        self.exported = exported
        self.policy = policy
        self._device = device
        self.patterns = {pattern: pattern_of(pattern) for pattern in policy.exclude}
        self.rules: dict[Node, Rule] = {}
        self.kinds: dict[Node, Kind] = {}  # where the rules decided, under the policy and on the device
        self.decisions: dict[Node, Decision] = {}  # ``settle`` may still change some
        self.non_fp32: dict[Node, str] = {}  # why the outputs of a node are no dense FP32 arrays
        self.data_shapes: Mapping[Node, tuple] = {}  # of each FullyConnected in training, where known
        self.low_inputs: dict[Node, set[int]] = {}  # what control flow reads in float16
        self._channels: dict[Entry, int] = {}
        # Operators whose first output, an FP32 tensor in float16's range, may be read in either dtype.
        self._either: set[Node] = set()
        # Of these, in graph order, those that may compute in float16 because their kernels sum in FP32.
        self._summed: dict[Node, None] = {}
        self._sums_safely = policy.compute == "float16" and not exported and safe_sums.is_set()
        # Operators that follow their inputs and read nothing but such outputs, until ``settle`` decides.
        self._undecided: dict[Node, None] = {}
        # Operators that only move the values of parameters in ``_storable``, until ``settle`` decides.
        self._movers: dict[Node, None] = {}

    def excluded(self, name: str) -> str:
        """Return why the node ``name`` is excluded, such as ``"excluded by '*head*'"``; ``""`` if it is not."""
        found = next((pattern for pattern, compiled in self.patterns.items() if compiled.match(name)), None)
        return f"excluded by {found!r}" if found else ""

    def by_rule(self, node: Node, rule: Rule) -> tuple[bool, str]:
        """Return whether ``node`` computes in low precision by rule, policy and device, and why; see ``settle``."""
        kind, reason = self.kind(node, rule)
        self.kinds[node] = kind
        # Such a product computes positions, angles or camera matrices, not features.
        if kind is Kind.LOW and not self._is_learned(node) and node.op not in self.policy.low_ops:
            return False, "it multiplies data and constants: none of its operands depends on a parameter"
        if kind is Kind.FOLLOW:
            read = deciding_inputs(node, rule)
            if not read:
                return False, reason
            if rule.exact and all(map(self._is_parameter, read)):
                self._movers[node] = None
                return True, reason
            if not self._all_may_be_low(read):
                return False, "it follows its inputs, and one of them is FP32"
            if not any(map(self._is_low, read)):
                self._undecided[node] = None
        elif rule.normalized and self.policy.compute == "float16" and node.op not in self.policy.full_ops:
            # Not in bfloat16: a residual network adds such outputs, and 8 bits are too few for these sums.
            self._either.add(node)
            if self._sums_safely and kind is Kind.FULL and safe_sums.may_be_float16(node.op, node.attrs, self.policy):
                self._summed[node] = None
        elif kind is Kind.FULL and self._only_lacks_a_kernel(node, rule):
            # Its values are in float16's range: an addition of one and a float16 tensor may still compute in float16.
            self._either.add(node)
        return kind in (Kind.LOW, Kind.FOLLOW), reason

    def _only_lacks_a_kernel(self, node: Node, rule: Rule) -> bool:
        """Return whether ``node`` is FP32 only for the device's kernel, such as that of a bilinear resizing."""
        if self.policy.compute != "float16" or self._kind_by_rule(node, rule)[0] is not Kind.FOLLOW:
            return False
        read = deciding_inputs(node, rule)
        return bool(read) and self._all_may_be_low(read)

    def _all_may_be_low(self, entries: Iterable[Entry]) -> bool:
        return all(self._is_low(entry) or self._may_be_either(entry) for entry in entries)

    def settle(self, graph: Graph, by_plan: bool) -> None:
        """Decide, in ``decisions``, for the operators that ``by_rule`` left undecided.
        ``by_plan``: the others follow a plan, which lacks the undecided and the movers, so these compute in FP32."""
        readers = graph.readers()
        heads = {entry.node for entry in graph.heads}
        behind_norms: set[Node] = set()
        # An operator that reads only what is safe in both dtypes, such as a relu behind an FP32 BatchNorm, computes in
        # low precision in three cases: (1) an operator reads it in low precision, and would round it anyway; (2) a
        # BatchNorm of cuDNN reads it; (3) it makes no graph output, and a BatchNorm of cuDNN with float16 data is in
        # front of it, perhaps with others of case (3) between.
        for node in self._undecided:
            after_norm = (e.node in behind_norms or self._norm_returns_float16(e) for e in node.inputs)
            if node not in heads and any(after_norm):
                behind_norms.add(node)
        for node in reversed(list(self._undecided)):
            wanted = (self.wants_low(*reader) or self.norm_reads_float16(*reader) for reader in readers.get(node, ()))
            if by_plan or not (node in behind_norms or any(wanted)):
                why = "it follows a normalization, and nothing that reads it computes in low precision"
                self.decisions[node] = Decision(node.op, False, why)
        # Rounding commutes with moving, and so the parameters can be stored in float16.
        for node in reversed(list(self._movers)):
            if by_plan or node in heads or not all(self.wants_low(*reader) for reader in readers.get(node, ())):
                why = "it moves the values of parameters, and not all that read it compute in low precision"
                self.decisions[node] = Decision(node.op, False, why)
        # These need no cast, and their kernels sum in FP32.
        for node in self._summed:
            used = node in readers and node not in heads and all(self.wants_low(*reader) for reader in readers[node])
            if used and self._makes_low(node.inputs[0]):
                self.decisions[node] = Decision(node.op, True, safe_sums.REASON)

    def _norm_returns_float16(self, entry: Entry) -> bool:
        """Return whether ``entry`` is of a BatchNorm with float16 data for which ``norm_reads_float16`` is True."""
        node = entry.node
        return node in self._either and self.norm_reads_float16(node, 0) and self._is_low(node.inputs[0])

    def norm_reads_float16(self, node: Node, position: int) -> bool:
        """Return whether ``position`` is that of the data of a BatchNorm that cuDNN could compute from float16 data."""
        # cuDNN's kernel reads and writes float16 and computes in FP32: it gives what cast, BatchNorm and cast give. On
        # a GPU, with norm=None, it replaces them. On a CPU, or with norm="float32", they stay, but count alike, so that
        # all give the same numbers. ``_either`` lacks what ``exclude``, ``full_ops`` or a plan decided.
        return (
            node in self._either
            and position == 0
            and self.rules[node].kind is Kind.NORM
            and self.policy.norm != "compute"
            and not leaves_cudnn(node.attrs)
        )

    def kind(self, node: Node, rule: Rule) -> tuple[Kind, str]:
        """Return how ``node`` takes part under the policy and on the device, whatever its inputs are, and why."""
        kind, reason = self._kind_by_rule(node, rule)
        if kind in (Kind.LOW, Kind.FOLLOW) and not self._any_kernel:
            channels = self._channels.get(node.inputs[0]) if node.inputs else None
            missing = missing_kernel(
                *(node.op, node.attrs, self.policy.compute, self._device),
                channels=channels,
                data_shape=self.data_shapes.get(node, ()),
                slow_too=self._slow_too,
            )
            if missing:
                return Kind.FULL, missing
        return kind, reason

    def _kind_by_rule(self, node: Node, rule: Rule) -> tuple[Kind, str]:
        """Return the kind and the reason as if the device had every kernel."""
        kind, reason = rule.resolve(node.attrs, self.policy.compute)
        if node.op in self.policy.full_ops:
            return Kind.FULL, "the policy's full_ops names it"
        if node.op in self.policy.low_ops:
            kind, reason = Kind.LOW, "the policy's low_ops names it"
        # A BatchNorm that stays NORM is FP32 in the plan; on a GPU ``kernels/norms.drop_casts`` may drop its casts.
        if kind is Kind.NORM and self.policy.norm == "compute":
            kind = Kind.FOLLOW
        if kind is Kind.FOLLOW and is_square(node):
            return Kind.FULL, "it squares its input, and squares leave float16's range and cancel in a variance"
        return kind, reason

    def _is_low(self, entry: Entry) -> bool:
        """Return whether ``entry`` is in low precision for certain, not up to ``settle``; False for a variable."""
        return entry.node not in self._undecided and entry.node not in self._movers and self._makes_low(entry)

    def _is_parameter(self, entry: Entry) -> bool:
        """Return whether ``entry`` has the values of parameters that may be stored in float16, perhaps moved."""
        node = entry.node
        return node in self._movers or (node.is_variable and node.name in self._storable and node not in self.non_fp32)

    def _may_be_either(self, entry: Entry) -> bool:
        """Return whether ``entry`` may be read in FP32 or low precision, as ``settle`` decides; never in bfloat16."""
        if entry.node in self._either:
            return entry.index == 0
        return entry.node in self._undecided and self._makes_low(entry)

    def _makes_low(self, entry: Entry) -> bool:
        """Return whether ``entry`` is in low precision by the decision so far, which ``settle`` may undo."""
        decision = self.decisions.get(entry.node)
        return decision is not None and decision.low and entry.index not in self.rules[entry.node].keep_outputs

    def wants_low(self, node: Node, position: int) -> bool:
        if node in self.low_inputs:
            return position in self.low_inputs[node]
        return self.decisions[node].low and position not in self.rules[node].keep

    def note_channels(self, node: Node) -> None:
        # Some bfloat16 kernels of oneDNN are slower than FP32's unless it is a multiple of ``CHANNEL_BLOCK``.
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

    def note_learned(self, node: Node) -> None:
        """Record whether the values of ``node`` depend on a parameter that is no constant."""
        known = self._learned_names
        if known is not None and (node.name in known if node.is_variable else self._is_learned(node)):
            self._learned.add(node)

    def _is_learned(self, node: Node) -> bool:
        """Return whether ``node`` reads what depends on a parameter; True if the parameters are not known."""
        return self._learned_names is None or any(entry.node in self._learned for entry in node.inputs)

    def non_fp32_reason(self, node: Node, rule: Rule | None) -> str:
        """Return why the outputs of ``node`` are no dense FP32 arrays, which alone mxmp casts, or ``""``.
        ``rule`` is None for a variable."""
        attrs = node.attrs
        dtype = attrs.get("__dtype__") if rule is None else attrs.get("dtype")
        if dtype is not None and dtype not in _FLOAT32:
            return f"the graph asks for {_NAMES.get(dtype, dtype)} here"
        storage = attrs.get("__storage_type__", attrs.get("stype", "0"))
        if storage not in _DENSE:
            return SPARSE
        if rule is None:
            return self._non_fp32_inputs.get(node.name, "")
        if dtype is not None:
            return ""
        # Without a parameter ``dtype``, it has the dtype of its inputs, except those in ``Rule.keep``, such as indices.
        for position, entry in enumerate(node.inputs):
            if position not in rule.keep and entry.node in self.non_fp32:
                return self.non_fp32[entry.node]
        return ""

    def returns_dense(self, node: Node, reason: str) -> bool:
        """Return whether an operator that stays in FP32 for ``reason``, a sparse input, returns a dense FP32 array."""
        if node.is_variable or reason not in (SPARSE, SPARSE_GRADIENT):
            return False
        if node.op == "dot" and reason == SPARSE:
            left = self.non_fp32.get(node.inputs[0].node) == SPARSE
            turned = node.attrs.get("transpose_a", "0") in ("1", "True")
            return left and not turned and node.attrs.get("forward_stype", "0") in (*_DENSE, "None")
        return reason == SPARSE_GRADIENT or node.op in _RETURN_DENSE


def _shapes_of_products(graph: Graph, shapes: Mapping[str, tuple]) -> dict[Node, tuple]:
    """Return the shape of the data of each FullyConnected, as ``output_shapes`` does; empty if they do not fit."""
    products = [node for node in graph.nodes() if node.op == "FullyConnected"]
    if not products:
        return {}
    read = Graph([node.inputs[0] for node in products], graph.attrs, numpy=graph.numpy)
    try:
        return dict(zip(products, output_shapes(read.to_symbol(), shapes)))
    except mx.MXNetError:  # binding them will raise an error that says so
        return {}


def _low_variables(graph: Graph, draft: _Draft, parameters: Collection[str] | None) -> set[Node]:
    """Return the parameters that all their readers read in float16; None for ``parameters``: see ``_WEIGHT_SLOTS``."""
    heads = {entry.node for entry in graph.heads}
    low = set()
    for variable, users in graph.readers().items():
        if not variable.is_variable or variable in draft.non_fp32 or variable in heads:
            continue
        if all(draft.wants_low(node, position) for node, position in users) and (
            variable.name in parameters
            if parameters is not None
            else all(position in _WEIGHT_SLOTS.get(node.op, ()) for node, position in users)
        ):
            low.add(variable)
    return low
