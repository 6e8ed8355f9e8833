"""The decisions about one graph while ``decide`` makes its plan.

``Draft.by_rule`` decides from the inputs to the outputs, and ``Draft.settle`` then for what depends on its readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Collection, Iterable, Iterator, Mapping

from ..policy import Policy, pattern_of
from . import safe_sums
from .graph import TYPE_CODES, Entry, Graph, Node
from .plan import DecidedGraph, Decision, rule_under
from .rule import is_true
from .rules import Kind, Rule, leaves_cudnn, missing_kernel

# A variable's dtype is a code, an operator's a name.
_FLOAT32 = (TYPE_CODES["float32"], "float32", "None", "-1")
_NAMES = {code: name for name, code in TYPE_CODES.items()}
_DENSE = ("0", "-1", "default")
# Reasons why a variable is cast nowhere: mxmp's cast would go through dense storage, forward or backward.
SPARSE = "its storage is sparse, and mxmp casts dense arrays only"
SPARSE_GRADIENT = "it reads a parameter with a row-sparse gradient, which the gradient of a cast would make dense"
# Operators that return dense arrays whatever the storage of their inputs is; many others keep it. See also ``dot``.
_RETURN_DENSE = {
    *("FullyConnected", "Embedding", "take", "sum", "mean", "norm", "_square_sum", "Activation", "Dropout", "Reshape"),
    *("Flatten", "transpose", "softmax", "log_softmax", "broadcast_add", "broadcast_sub"),
}
# Operators whose first output has as many channels as their first input.
_KEEP_CHANNELS = frozenset(
    ["Activation", "BatchNorm", "Dropout", "LeakyReLU", "Pooling", "clip", "elemwise_add", "relu"]
)


TIMES = frozenset(["elemwise_mul", "broadcast_mul", "_npi_multiply"])


@dataclass(frozen=True)
class Options:
    """What ``decide`` may know of a graph and its use, beside the policy and the device."""

    parameters: Collection[str] | None = None  # may be stored in float16; None: see ``decide._WEIGHT_SLOTS``
    stored_low: Collection[str] = ()  # parameters that another graph of the network stores in float16 already
    keep_output_names: bool = False  # FP32 for an operator whose graph outputs a cast would rename
    # Why a variable is no dense FP32 array, where the graph does not say it.
    non_fp32: Mapping[str, str] = field(default_factory=dict)
    # Of another plan: they overrule rules and missing kernels.
    decided: Mapping[str, Decision] = field(default_factory=dict)
    training_shapes: Mapping[str, tuple] = field(default_factory=dict)  # of the inputs; empty for inference too
    exported: bool = False  # to run elsewhere: MXNET_SAFE_ACCUMULATION does not count
    learned: Collection[str] | None = None  # all parameters but constants; None: inputs may be features
    is_body: bool = False
    any_kernel: bool = False  # as if the device had every kernel, except in bodies
    slow_too: bool = False  # kernels that are right, but slower than FP32's, count as well


DEFAULT = Options()


class Draft(DecidedGraph):
    """The plan of one graph while ``decide`` makes it."""

    def __init__(self, policy: Policy, device: str, options: Options) -> None:
        super().__init__()
        self.policy = policy
        self.options = options
        self._device = device
        self.patterns = {pattern: pattern_of(pattern) for pattern in policy.exclude}
        self.kinds: dict[Node, Kind] = {}  # where the rules decided, under the policy and on the device
        self.non_fp32: dict[Node, str] = {}  # why the outputs of a node are no dense FP32 arrays
        self.data_shapes: Mapping[Node, tuple] = {}  # of each FullyConnected in training, where known
        # Parameters that may be stored in float16, or are already.
        stored = {*(options.parameters or ()), *options.stored_low}
        self._storable = stored if policy.stores_low(device) else set()
        self._learned: set[Node] = set()
        self._channels: dict[Entry, int] = {}
        # Operators whose first output, an FP32 tensor in float16's range, may be read in either dtype.
        self._either: set[Node] = set()
        # Of these, in graph order, those that may compute in float16 because their kernels sum in FP32.
        self._summed: dict[Node, None] = {}
        self._sums_safely = policy.compute == "float16" and not options.exported and safe_sums.is_set()
        # Operators that follow their inputs and read nothing but such outputs, until ``settle`` decides.
        self._undecided: dict[Node, None] = {}
        # Operators that only move the values of parameters in ``_storable``, until ``settle`` decides.
        self._movers: dict[Node, None] = {}

    def operators(self, graph: Graph) -> Iterator[tuple[Node, Rule, str]]:
        """Yield each operator, its rule, and a reason to keep it in FP32 whatever the rule says, or ``""``.
        Record which outputs are no dense FP32 arrays, how many channels they have, and what is learned."""
        several = {head.node for head in graph.heads if self.options.keep_output_names and _is_numbered(head, graph)}
        for node in graph.nodes():
            self._note_channels(node)
            self._note_learned(node)
            rule = None if node.is_variable else rule_under(self.policy, node.op)
            fixed = self._non_fp32_reason(node, rule)
            if fixed and not self._returns_dense(node, fixed):
                self.non_fp32[node] = fixed
            fixed = fixed or self.excluded(node.name)
            if node in several:
                fixed = fixed or "casts would rename the graph outputs that it makes, because it has several"
            if rule is not None:
                yield node, rule, fixed

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
            if not any(map(self._is_low_for_certain, read)):
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
        return all(self._is_low_for_certain(entry) or self._may_be_either(entry) for entry in entries)

    def settle(self, graph: Graph) -> None:
        """Decide, in ``decisions``, for the operators that ``by_rule`` left undecided."""
        # If the others follow a plan, it lacks the undecided and the movers, so these compute in FP32.
        by_plan = bool(self.options.decided)
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
            if used and self.is_low(node.inputs[0]):
                self.decisions[node] = Decision(node.op, True, safe_sums.REASON)

    def _norm_returns_float16(self, entry: Entry) -> bool:
        """Return whether ``entry`` is of a BatchNorm with float16 data for which ``norm_reads_float16`` is True."""
        node = entry.node
        return node in self._either and self.norm_reads_float16(node, 0) and self._is_low_for_certain(node.inputs[0])

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
        if kind in (Kind.LOW, Kind.FOLLOW) and not self.options.any_kernel:
            channels = self._channels.get(node.inputs[0]) if node.inputs else None
            missing = missing_kernel(
                *(node.op, node.attrs, self.policy.compute, self._device),
                channels=channels,
                data_shape=self.data_shapes.get(node, ()),
                slow_too=self.options.slow_too,
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

    def _is_low_for_certain(self, entry: Entry) -> bool:
        """Return whether ``entry`` is in low precision for certain, not up to ``settle``; False for a variable."""
        return entry.node not in self._undecided and entry.node not in self._movers and self.is_low(entry)

    def _is_parameter(self, entry: Entry) -> bool:
        """Return whether ``entry`` has the values of parameters that may be stored in float16, perhaps moved."""
        node = entry.node
        return node in self._movers or (node.is_variable and node.name in self._storable and node not in self.non_fp32)

    def _may_be_either(self, entry: Entry) -> bool:
        """Return whether ``entry`` may be read in FP32 or low precision, as ``settle`` decides; never in bfloat16."""
        if entry.node in self._either:
            return entry.index == 0
        return entry.node in self._undecided and self.is_low(entry)

    def _note_channels(self, node: Node) -> None:
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

    def _note_learned(self, node: Node) -> None:
        """Record whether the values of ``node`` depend on a parameter that is no constant."""
        known = self.options.learned
        if known and (node.name in known if node.is_variable else self._is_learned(node)):
            self._learned.add(node)

    def _is_learned(self, node: Node) -> bool:
        """Return whether ``node`` reads what depends on a parameter; True if the parameters are not known."""
        return not self.options.learned or any(entry.node in self._learned for entry in node.inputs)

    def _non_fp32_reason(self, node: Node, rule: Rule | None) -> str:
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
            return self.options.non_fp32.get(node.name, "")
        if dtype is not None:
            return ""
        # Without a parameter ``dtype``, it has the dtype of its inputs, except those in ``Rule.keep``, such as indices.
        for position, entry in enumerate(node.inputs):
            if position not in rule.keep and entry.node in self.non_fp32:
                return self.non_fp32[entry.node]
        return ""

    def _returns_dense(self, node: Node, reason: str) -> bool:
        """Return whether an operator that stays in FP32 for ``reason``, a sparse input, returns a dense FP32 array."""
        if node.is_variable or reason not in (SPARSE, SPARSE_GRADIENT):
            return False
        if node.op == "dot" and reason == SPARSE:
            left = self.non_fp32.get(node.inputs[0].node) == SPARSE
            turned = is_true(node.attrs.get("transpose_a"))
            return left and not turned and node.attrs.get("forward_stype", "0") in (*_DENSE, "None")
        return reason == SPARSE_GRADIENT or node.op in _RETURN_DENSE


def deciding_inputs(node: Node, rule: Rule) -> list[Entry]:
    """Return the inputs of ``node`` that decide its dtype: those in neither ``Rule.keep`` nor ``Rule.params``."""
    return [entry for position, entry in enumerate(node.inputs) if position not in (*rule.keep, *rule.params)]


def is_square(node: Node) -> bool:
    return node.op in TIMES and node.inputs[0] == node.inputs[1]


def _is_numbered(head: Entry, graph: Graph) -> bool:
    """Return whether MXNet numbers the outputs of the operator that makes ``head``, as in ``"split_output0"``."""
    node = head.node
    # Custom operators and control flow never compute in low precision: no cast renames their outputs.
    if head.index or node.is_variable or node.op == "Custom" or node.subgraphs:
        return head.index > 0
    inputs = [Entry(Node("null", f"input{position}")) for position in range(len(node.inputs))]
    alone = Graph([Entry(Node(node.op, node.name, node.attrs, inputs))], graph.attrs)
    return alone.to_symbol().list_outputs() != [f"{node.name}_output"]
