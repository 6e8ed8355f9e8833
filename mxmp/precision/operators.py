"""What each operator of a graph may compute in by itself: by rule, policy, storage and kernel, whatever reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Collection, Mapping

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..policy import Policy, pattern_of
from .graph import TYPE_CODES, Entry, Graph, Node
from .missing_kernels import SLOW_BY_SHAPE, is_true, leaves_cudnn, missing_kernel
from .plan import Decision
from .rule import Kind, Need, Role, Rule
from .rule_table import KEEP_CHANNELS, RETURN_DENSE
from .rules import kind_under, rule_under
from .subgraphs import Body, bodies

# A variable's dtype is a code, an operator's a name.
_FLOAT32 = (TYPE_CODES["float32"], "float32", "None", "-1")
_NAMES = {code: name for name, code in TYPE_CODES.items()}
_DENSE = ("0", "-1", "default")
_RETURN_DENSE, _KEEP_CHANNELS = (frozenset(names.split()) for names in (RETURN_DENSE, KEEP_CHANNELS))
# Reasons why a variable is cast nowhere: mxmp's cast would go through dense storage, forward or backward.
SPARSE = "its storage is sparse, and mxmp casts dense arrays only"
SPARSE_GRADIENT = "it reads a parameter with a row-sparse gradient, which the gradient of a cast would make dense"
FLOAT64 = "the array that is passed here is float64, which stays so: pass float32"
_STEERS = "it computes the condition of a loop or branch, which rounding could change"


@dataclass(frozen=True)
class Options:
    """What ``decide`` may know of a graph and its use, beside the policy and the device."""

    parameters: Collection[str] | None = None  # may be stored in float16; None: see ``Rule.weights``
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


def is_float64(dtype: Any) -> bool:
    return dtype in (np.float64, "float64")


def why_non_fp32(array: NDArray) -> str:
    """Return why an input is cast nowhere, or ``""``."""
    return SPARSE if isinstance(array, BaseSparseNDArray) else FLOAT64 if is_float64(array.dtype) else ""


def kind_of(array: NDArray) -> str:
    """Return ``why_non_fp32``, or ``"float16"`` for such an input; runs for each input of each call."""
    return why_non_fp32(array) or ("float16" if array.dtype == np.float16 else "")


def non_fp32(arrays: Mapping[str, NDArray]) -> dict[str, str]:
    """Return ``why_non_fp32`` of inputs by name, without those that may be cast."""
    return {name: why for name, array in arrays.items() if (why := why_non_fp32(array))}


class Operators:
    """The operators of an FP32 graph: what the rules, the policy, their arrays and the device's kernels say of each."""

    def __init__(self, graph: Graph, policy: Policy, device: str, options: Options) -> None:
        self.graph, self.policy, self.options, self._device = graph, policy, options, device
        self._patterns = {pattern: pattern_of(pattern) for pattern in policy.exclude}
        self._data_shapes = self._shapes_of_products()
        self.names, self.readers = graph.names(), graph.readers()  # the names are the keys of a plan
        matched = {pattern for pattern, found in self._patterns.items() if any(found.match(n.name) for n in self.names)}
        self.unmatched: set[str] = {*self._patterns} - matched  # patterns that exclude nothing, in bodies neither
        self.rules: dict[Node, Rule] = {}
        self.squares: set[Node] = set()
        self.selecting: set[Node] = set()  # each of their values is an input value, or zero
        self.makes: dict[Node, int] = {}  # what low precision would take from the values that an operator computes
        self._by_rule: dict[Node, tuple[Kind, str]] = {}
        self._apply_rules()
        self.fixed: dict[Node, str] = {}  # why an operator stays in FP32 whatever its rule says
        self.non_fp32: dict[Node, str] = {}  # why the outputs of a node are no dense FP32 arrays
        # The inputs that decide the dtype of an operator: those in neither ``Rule.keep`` nor ``Rule.params``.
        self.reads: dict[Node, list[Entry]] = {}
        self.storable: set[Node] = set()  # parameters that may be stored in float16
        self._learned: set[Node] = set()  # their values depend on a parameter that is no constant
        self._look_at_arrays()
        # How an operator takes part, whatever its inputs are, and why.
        self.kinds: dict[Node, tuple[Kind, str]] = {}
        self.lacking: set[Node] = set()  # would follow their inputs if the device had a kernel: a bilinear resizing
        self.normalized: set[Node] = set()  # return FP32 that may be read in either dtype; empty in bfloat16
        self.cudnn_norms: set[Node] = set()  # BatchNorms that cuDNN could compute from float16, in FP32 inside
        self._channels: dict[Entry, int] = {}
        self._look_for_kernels()
        # The bodies of control flow, each with its own.
        self.within = {n: [(body, self._inside(n, body)) for body in bodies(n)] for n in self.rules if n.subgraphs}
        for within in self.within.values():
            self.unmatched.intersection_update(*(inside.unmatched for _, inside in within))

    def excluded(self, name: str) -> str:
        """Return why the node ``name`` is excluded, such as ``"excluded by '*head*'"``; ``""`` if it is not."""
        found = next((pattern for pattern, compiled in self._patterns.items() if compiled.match(name)), None)
        return f"excluded by {found!r}" if found else ""

    # -- by rule and policy -----------------------------------------------------------------------------

    def _apply_rules(self) -> None:
        for node in self.names:
            if not node.is_variable:
                rule = self.rules[node] = rule_under(self.policy, node.op)
                multiplies_itself = rule.role is Role.TIMES and node.inputs[0] == node.inputs[1]
                if multiplies_itself or rule.role is Role.SQUARE:
                    self.squares.add(node)
                if rule.exact or node.attrs.get(rule.exact_with[0]) == rule.exact_with[1]:
                    self.selecting.add(node)
                self._by_rule[node] = kind_under(self.policy, node.op, rule, node.attrs, squares=multiplies_itself)
                self.makes[node] = rule.made(node.attrs, self.policy.compute)

    # -- by what the arrays are -------------------------------------------------------------------------

    def _look_at_arrays(self) -> None:
        graph, known = self.graph, self.options.learned
        storable = {*(self.options.parameters or ()), *self.options.stored_low}
        several = {head.node for head in graph.heads if self.options.keep_output_names and _is_numbered(head, graph)}
        for node in self.names:
            if known and (node.name in known if node.is_variable else self._is_learned(node)):
                self._learned.add(node)
            fixed = self._non_fp32_reason(node)
            if fixed and not self._returns_dense(node, fixed):
                self.non_fp32[node] = fixed
            if node.is_variable:
                self.makes[node] = self._made_by_variable(node)
                if node.name in storable and node not in self.non_fp32:
                    self.storable.add(node)
                continue
            fixed = fixed or self.excluded(node.name)
            if node in several:
                fixed = fixed or "casts would rename the graph outputs that it makes, because it has several"
            if fixed:
                self.fixed[node] = fixed
            aside = (*self.rules[node].keep, *self.rules[node].params)
            self.reads[node] = [entry for position, entry in enumerate(node.inputs) if position not in aside]

    def _is_learned(self, node: Node) -> bool:
        """Return whether ``node`` reads what depends on a parameter; True if the parameters are not known."""
        return not self.options.learned or any(entry.node in self._learned for entry in node.inputs)

    def _made_by_variable(self, variable: Node) -> int:
        # Data, positions and constants have all the digits that FP32 has; a feature, or a weight, has noise.
        known = self.options.learned
        is_data = variable.name not in known if known is not None else not self._is_weight(variable)
        return Need.EXACT if is_data and not self.options.is_body else 0

    def _is_weight(self, variable: Node) -> bool:
        users = self.readers.get(variable, ())
        return any(position > 0 and self.rules[user].role is Role.MATRIX for user, position in users)

    def _non_fp32_reason(self, node: Node) -> str:
        """Return why the outputs of ``node`` are no dense FP32 arrays, which alone mxmp casts, or ``""``."""
        attrs = node.attrs
        dtype = attrs.get("__dtype__" if node.is_variable else "dtype")
        if dtype is not None and dtype not in _FLOAT32:
            return f"the graph asks for {_NAMES.get(dtype, dtype)} here"
        storage = attrs.get("__storage_type__", attrs.get("stype", "0"))
        if storage not in _DENSE:
            return SPARSE
        if node.is_variable:
            return self.options.non_fp32.get(node.name, "")
        if dtype is not None:
            return ""
        # Without a parameter ``dtype``, it has the dtype of its inputs, except those in ``Rule.keep``, such as indices.
        for position, entry in enumerate(node.inputs):
            if position not in self.rules[node].keep and entry.node in self.non_fp32:
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

    # -- by the kernels of the device -------------------------------------------------------------------

    def _look_for_kernels(self) -> None:
        policy = self.policy
        for node, rule in self.rules.items():
            self._note_channels(node)
            kind, _ = self.kinds[node] = self._kind_on_device(node)
            if kind is Kind.FULL and self._by_rule[node][0] is Kind.FOLLOW:
                self.lacking.add(node)
            # A residual network adds such outputs, and bfloat16's 8 bits are too few for these sums.
            if policy.compute == "float16" and rule.normalized and node.op not in policy.full_ops:
                self.normalized.add(node)
                # It reads and writes float16 and gives what cast, BatchNorm and cast give. On a GPU, with norm=None, it
                # replaces them. On a CPU, or with norm="float32", they stay, but count alike: the numbers are the same.
                if rule.kind is Kind.NORM and policy.norm != "compute" and not leaves_cudnn(node.attrs):
                    self.cudnn_norms.add(node)

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
        if kind is Kind.LOW and not self._is_learned(node) and node.op not in self.policy.low_ops:
            return Kind.FULL, "it multiplies data and constants: none of its operands depends on a parameter"
        return kind, reason

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

    def _shapes_of_products(self) -> dict[Node, tuple]:
        """Return the shape in training of the data of each operator whose bfloat16 kernel is slow by its shape."""
        shapes = self.options.training_shapes if self.policy.compute == "bfloat16" else {}
        products = [node for node in self.graph.nodes() if node.op in SLOW_BY_SHAPE] if shapes else []
        if not products:
            return {}
        try:
            return dict(zip(products, self.graph.shapes_of([node.inputs[0] for node in products], shapes)))
        except mx.MXNetError:  # they do not fit, and binding them will raise an error that says so
            return {}

    # -- in bodies of control flow ----------------------------------------------------------------------

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


def _is_numbered(head: Entry, graph: Graph) -> bool:
    """Return whether MXNet numbers the outputs of the operator that makes ``head``, as in ``"split_output0"``."""
    node = head.node
    # Custom operators and control flow never compute in low precision: no cast renames their outputs.
    if head.index or node.is_variable or node.op == "Custom" or node.subgraphs:
        return head.index > 0
    inputs = [Entry(Node("null", f"input{position}")) for position in range(len(node.inputs))]
    alone = Graph([Entry(Node(node.op, node.name, node.attrs, inputs))], graph.attrs)
    return alone.to_symbol().list_outputs() != [f"{node.name}_output"]
