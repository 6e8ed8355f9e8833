"""What each operator of a graph may compute in by itself: by rule, policy, kernel and storage, whatever reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Collection, Mapping

import mxnet as mx

from ..policy import Policy, pattern_of
from .graph import TYPE_CODES, Entry, Graph, Node, output_shapes
from .plan import Decision, rule_under
from .rule import Need, Role, is_true
from .rules import Kind, Rule, leaves_cudnn, missing_kernel
from .subgraphs import Body, bodies

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
_STEERS = "it computes the condition of a loop or branch, which rounding could change"


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


class Operators:
    """The operators of an FP32 graph, each with its rule, and its kind under the policy and on the device."""

    def __init__(self, graph: Graph, policy: Policy, device: str, options: Options) -> None:
        self.graph = graph
        self.policy = policy
        self.options = options
        self.patterns = {pattern: pattern_of(pattern) for pattern in policy.exclude}
        self.rules: dict[Node, Rule] = {}
        self.fixed: dict[Node, str] = {}  # why an operator stays in FP32 whatever its rule says
        self.non_fp32: dict[Node, str] = {}  # why the outputs of a node are no dense FP32 arrays
        self._by_rule: dict[Node, tuple[Kind, str]] = {}
        self._on_device: dict[Node, tuple[Kind, str]] = {}
        self._device = device
        trains_low = policy.compute == "bfloat16" and options.training_shapes
        self._data_shapes = _shapes_of_products(graph, options.training_shapes) if trains_low else {}
        # Parameters that may be stored in float16, or are already.
        stored = {*(options.parameters or ()), *options.stored_low}
        self._storable = stored if policy.stores_low(device) else set()
        self._learned: set[Node] = set()
        self._channels: dict[Entry, int] = {}
        # The bodies of control flow, each with its own.
        self.within: dict[Node, list[tuple[Body, Operators]]] = {}
        self.names = graph.names()  # the keys of a plan
        several = {head.node for head in graph.heads if options.keep_output_names and _is_numbered(head, graph)}
        for node in graph.nodes():
            self._note_channels(node)
            self._note_learned(node)
            rule = None if node.is_variable else rule_under(policy, node.op)
            fixed = self._non_fp32_reason(node, rule)
            if fixed and not self._returns_dense(node, fixed):
                self.non_fp32[node] = fixed
            fixed = fixed or self.excluded(node.name)
            if node in several:
                fixed = fixed or "casts would rename the graph outputs that it makes, because it has several"
            if rule is not None:
                self.rules[node] = rule
                self._by_rule[node] = self._kind_by_rule(node, rule)
                self._on_device[node] = self._kind_on_device(node)
                if fixed:
                    self.fixed[node] = fixed
                if node.subgraphs:
                    self.within[node] = [(body, self._inside(node, body)) for body in bodies(node)]

    def excluded(self, name: str) -> str:
        """Return why the node ``name`` is excluded, such as ``"excluded by '*head*'"``; ``""`` if it is not."""
        found = next((pattern for pattern, compiled in self.patterns.items() if compiled.match(name)), None)
        return f"excluded by {found!r}" if found else ""

    def kind(self, node: Node) -> tuple[Kind, str]:
        """Return how ``node`` takes part under the policy and on the device, whatever its inputs are, and why."""
        return self._on_device[node]

    def lacks_a_kernel(self, node: Node) -> bool:
        """Return whether ``node`` would follow its inputs if the device had a kernel, such as a bilinear resizing."""
        return self.kind(node)[0] is Kind.FULL and self._by_rule[node][0] is Kind.FOLLOW

    def is_learned(self, node: Node) -> bool:
        """Return whether ``node`` reads what depends on a parameter; True if the parameters are not known."""
        return not self.options.learned or any(entry.node in self._learned for entry in node.inputs)

    def makes(self, node: Node) -> int:
        """Return what low precision would take from the values that ``node`` computes, or a variable has."""
        if not node.is_variable:
            return self.rules[node].made(node.attrs, self.policy.compute)
        known = self.options.learned
        # Data, positions and constants have all the digits that FP32 has; a feature, or a weight, has noise.
        is_data = node.name not in known if known is not None else not self._is_weight(node)
        return Need.EXACT if is_data and not self.options.is_body else 0

    def is_storable(self, node: Node) -> bool:
        """Return whether ``node`` is a parameter that may be stored in float16."""
        return node.is_variable and node.name in self._storable and node not in self.non_fp32

    def is_normalized(self, node: Node) -> bool:
        """Return whether ``node``, in FP32, returns what may be read in either dtype; never in bfloat16."""
        # A residual network adds such outputs, and bfloat16's 8 bits are too few for these sums.
        return self.policy.compute == "float16" and self.rules[node].normalized and node.op not in self.policy.full_ops

    def rounds_nothing(self, node: Node) -> bool:
        """Return whether each value of ``node`` is an input value, or zero."""
        return self.rules[node].exact or (node.op == "Activation" and node.attrs.get("act_type") == "relu")

    def deciding_inputs(self, node: Node) -> list[Entry]:
        """Return the inputs that decide the dtype of ``node``: those in neither ``Rule.keep`` nor ``Rule.params``."""
        rule = self.rules[node]
        return [entry for position, entry in enumerate(node.inputs) if position not in (*rule.keep, *rule.params)]

    def is_cudnn_norm(self, node: Node) -> bool:
        """Return whether ``node`` is a BatchNorm that cuDNN could compute from float16 data, in FP32 inside."""
        # It reads and writes float16 and gives what cast, BatchNorm and cast give. On a GPU, with norm=None, it
        # replaces them. On a CPU, or with norm="float32", they stay, but count alike: all give the same numbers.
        policy = self.policy
        return (
            self.rules[node].kind is Kind.NORM
            and policy.compute == "float16"
            and policy.norm != "compute"
            and node.op not in policy.full_ops
            and not leaves_cudnn(node.attrs)
        )

    def _inside(self, node: Node, body: Body) -> Operators:
        """Return the operators of a body of ``node``."""
        outer = {variable.name: node.inputs[position].node for variable, position in body.positions.items()}
        prefix, decided = body.prefix(self.names[node]), self.options.decided
        options = Options(
            parameters=(),
            non_fp32={name: self.non_fp32[source] for name, source in outer.items() if source in self.non_fp32},
            decided={name[len(prefix) :]: decision for name, decision in decided.items() if name.startswith(prefix)},
            exported=self.options.exported,
            is_body=True,
        )
        inside = Operators(body.graph, self.policy, self._device, options)
        why = self.excluded(node.name) or (_STEERS if body.steers else "")
        if why:
            inside.fixed = dict.fromkeys(inside.rules, why)
        return inside

    def _kind_on_device(self, node: Node) -> tuple[Kind, str]:
        kind, reason = self._by_rule[node]
        if kind in (Kind.LOW, Kind.FOLLOW) and not self.options.any_kernel:
            missing = missing_kernel(
                *(node.op, node.attrs, self.policy.compute, self._device),
                channels=self._channels.get(node.inputs[0]) if node.inputs else None,
                data_shape=self._data_shapes.get(node, ()),
                slow_too=self.options.slow_too,
            )
            if missing:
                return Kind.FULL, missing
        # Such a product computes positions, angles or camera matrices, not features.
        if kind is Kind.LOW and not self.is_learned(node) and node.op not in self.policy.low_ops:
            return Kind.FULL, "it multiplies data and constants: none of its operands depends on a parameter"
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
        if kind is Kind.FOLLOW and is_square(node, rule):
            return Kind.FULL, "it squares its input, and squares leave float16's range and cancel in a variance"
        return kind, reason

    def _is_weight(self, variable: Node) -> bool:
        users = self.graph.readers().get(variable, ())
        return any(position > 0 and rule_under(self.policy, user.op).role is Role.MATRIX for user, position in users)

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
        if known and (node.name in known if node.is_variable else self.is_learned(node)):
            self._learned.add(node)

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


def is_square(node: Node, rule: Rule) -> bool:
    return rule.role is Role.TIMES and node.inputs[0] == node.inputs[1]


def _is_numbered(head: Entry, graph: Graph) -> bool:
    """Return whether MXNet numbers the outputs of the operator that makes ``head``, as in ``"split_output0"``."""
    node = head.node
    # Custom operators and control flow never compute in low precision: no cast renames their outputs.
    if head.index or node.is_variable or node.op == "Custom" or node.subgraphs:
        return head.index > 0
    inputs = [Entry(Node("null", f"input{position}")) for position in range(len(node.inputs))]
    alone = Graph([Entry(Node(node.op, node.name, node.attrs, inputs))], graph.attrs)
    return alone.to_symbol().list_outputs() != [f"{node.name}_output"]
