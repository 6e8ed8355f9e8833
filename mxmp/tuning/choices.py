"""What there is to choose: the operators that may compute in either dtype, and the bytes that casts move."""

from __future__ import annotations

import json
from math import prod
from typing import Any, Collection, Mapping

import mxnet as mx

from ..kernels.norms import casts_inside
from ..pipeline import emitted
from ..policy import Policy
from ..precision.decide import NO_SHAPES, decide, may_compute_low
from ..precision.graph import Entry, Graph, Node, data_inputs, wanted_shapes
from ..precision.plan import Decision, Plan, PlannedGraph
from ..precision.rules import Kind, Rule
from ..precision.traffic import casts_left
from .cut import Choice, Costs, cheapest
from .stand_ins import with_stand_ins

# Operators whose outputs have shapes that depend on values, or that MXNet does not infer.
_SHAPED_BY_VALUES = ("_cond", "_contrib_boolean_mask")


class Task:
    """What ``tune`` plans in one run: a graph, the policy for it, and the plans among which it can choose.

    The choice is between plans that are as safe as the rules (``decide.may_compute_low``). They differ only in the
    operators of ``may_be_low``, each of which computes in low precision or in FP32.

    Parameters
    ----------
    graph : Graph
        The network in FP32, without casts.
    policy : Policy
        Operators that the policy excludes stay in FP32 under every plan.
    device : {"cpu", "gpu"}
        The device whose kernels run the graph.
    parameters : collection of str, optional
        The variables that may be stored in float16 (None: weights and biases of convolutions, FullyConnected and RNN).
    learned : collection of str, optional
        All parameters but constants (None: not known); see ``decide``.
    keep_output_names : bool
        True keeps an operator with several outputs in FP32 if one is a graph output, which a cast would rename.
    slow_too : bool
        True also allows low precision for operators whose low-precision kernel is correct but known to be slow.
    left_out : mapping of str to str, optional
        The operators that stay in FP32 under every plan although rules and policy allow low precision: from the name of
        each to the reason, for example ``"its low-precision kernel crashes here (SIGSEGV)"``.
    training_shapes : mapping of str to tuple
        The shapes of the inputs by name if the network will train: ``rules_plan`` keeps an operator in FP32 if its
        bfloat16 kernel is known to train slower at these shapes. Empty for inference.

    Attributes
    ----------
    graph, policy, device
        As given.
    names : dict of Node to str
        The unique name of every node of the graph, under which it is in a plan, for example ``"conv0"``.
    rules_plan : Plan
        The plan that the rules make without any measuring, with ``left_out`` in FP32.
    rule_of_node : mapping of Node to Rule
        The rule of every operator of the graph.
    may_be_low : frozenset of Node
        The operators for which ``tune`` may choose between low precision and FP32. Beside them, on a GPU in float16,
        BatchNorms: they compute in FP32 in every plan, and "low" are those that cuDNN lets read and write float16.
    matrix_operators : frozenset of Node
        The operators in ``may_be_low`` that are matrix operators (convolution, fully connected and the like).
    choice : Choice
        All assignments of dtypes to ``may_be_low``, among which ``cut.cheapest`` chooses.
    """

    def __init__(
        self,
        graph: Graph,
        policy: Policy,
        device: str,
        *,
        parameters: Collection[str] | None = None,
        learned: Collection[str] | None = None,
        keep_output_names: bool = False,
        slow_too: bool = False,
        left_out: Mapping[str, str] | None = None,
        training_shapes: Mapping[str, tuple] = NO_SHAPES,
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.device = device
        self.names = graph.names()
        self._readers = graph.consumers()
        self._options: dict[str, Any] = {
            "parameters": parameters,
            "learned": learned,
            "keep_output_names": keep_output_names,
        }
        self._training_shapes = training_shapes
        left = {node: name for node, name in self.names.items() if name in (left_out or {})}
        self._left_out = {name: Decision(node.op, False, (left_out or {})[name]) for node, name in left.items()}
        self.rules_plan = self._decide({})
        safe = may_compute_low(graph, policy, device, slow_too=slow_too, **self._options)
        safe = {node: kind for node, kind in safe.items() if node not in left}
        self.matrix_operators = frozenset(node for node, kind in safe.items() if kind is Kind.LOW)
        self._norms = frozenset(casts_inside(graph, policy, device))
        self.may_be_low = frozenset(safe) | self._norms
        self._planned = PlannedGraph(graph, self.rules_plan)
        self.rule_of_node: Mapping[Node, Rule] = self._planned.rules
        stored = set()
        if policy.stores_low(device):
            most = self._decide({self.names[node]: Decision(node.op, True, "") for node in safe})
            stored = {node for node, name in self.names.items() if node.is_variable and name in most.low_variables}
        self._may_be_stored_low = stored
        self.choice = Choice(self._planned, self.may_be_low, may_be_stored_low=self._may_be_stored_low)

    def low_nodes(self, plan: Plan) -> frozenset[Node]:
        """Return the operators in low precision under ``plan``, without those in the bodies of loops and conditions.

        BatchNorms of ``may_be_low`` are among them if one kernel computes them and the casts around them.
        """
        planned = PlannedGraph(self.graph, plan)
        low = frozenset(node for node, decision in planned.decisions.items() if decision.low)
        read_low = {entry for entry, users in self._readers.items() if any(planned.wants_low(*user) for user in users)}
        return low | {node for node in self._norms if planned.is_low(node.inputs[0]) and Entry(node) in read_low}

    def plan(self, low: Collection[Node], reasons: Mapping[Node, str]) -> Plan:
        """Return the plan in which, of ``may_be_low``, those in ``low`` compute in low precision, the rest in FP32.

        All other operators follow the rules; but if ``low`` is empty, operators in the bodies of loops and conditions
        compute in FP32. ``reasons`` maps operators of ``may_be_low`` to the text that the plan gives for their dtype.
        For an operator that is missing there, the plan gives the reason of the rules if these choose the same dtype,
        otherwise "chosen by tuning".
        """
        # What the rules keep in FP32, and is not to choose, is FP32 in ``choice``; undecided it would follow its input.
        by_rules = {name: self.rules_plan.decisions[name] for node, name in self.names.items() if not node.is_variable}
        decided = {name: decision for name, decision in by_rules.items() if not decision.low}
        for node in self.may_be_low - self._norms:
            name = self.names[node]
            before = self.rules_plan.decisions[name]
            if before.low is not (node in low) or node in reasons:
                decided[name] = Decision(node.op, node in low, reasons.get(node, "chosen by tuning"))
            else:
                decided[name] = before
        if not low:
            own = set(self.names.values())
            inside = {name: d for name, d in self.rules_plan.decisions.items() if name not in own}
            decided.update({name: Decision(d.op, False, "all of the graph is FP32") for name, d in inside.items()})
        return self._decide(decided)

    def least_bytes(self, shapes: Mapping[Entry, tuple[int, ...]]) -> frozenset[Node]:
        """Return the operators in low precision under the plan whose casts move the fewest bytes in one forward.

        Only plans are compared in which all of ``matrix_operators`` compute in low precision. Of several plans with the
        fewest bytes, the one with the most operators in low precision wins. ``shapes`` maps every tensor to its shape.
        """
        free = self.may_be_low - self.matrix_operators
        choice = Choice(self._planned, free, self.matrix_operators, self._may_be_stored_low)
        moved = cast_bytes(shapes)
        return cheapest(choice, Costs({}, dict.fromkeys(choice.free, 1e-2), moved, moved))

    def bytes_cast(self, plan: Plan, shapes: Mapping[Entry, tuple[int, ...]]) -> int:
        """Return how many bytes the casts of ``plan`` read and write in one forward, as ``explain`` counts them.

        Casts that a kernel makes inside do not count, nor do those in the bodies of loops and conditions. ``shapes``
        maps every tensor to its shape.
        """
        casted = casts_left(PlannedGraph(self.graph, plan), emitted(self.graph, plan))
        moved, casts = cast_bytes(shapes), (cast.inputs[0] for cast in casted.casts)
        return int(sum(moved[Entry(casted.source[entry.node], entry.index)] for entry in casts))

    def _decide(self, decided: Mapping[str, Decision]) -> Plan:
        """Return the plan with the decisions ``decided``, by the operators' names; other operators follow the rules.

        The operators of ``left_out``, an argument of the Task, stay in FP32 even if ``decided`` has them.
        """
        return decide(
            *(self.graph, self.policy, self.device),
            decided={**decided, **self._left_out},
            training_shapes=self._training_shapes,
            **self._options,
        )


def shapes_of(graph: Graph, known: Mapping[str, tuple[int, ...]]) -> dict[Entry, tuple[int, ...]]:
    """Return the shape of every tensor that an operator of ``graph`` reads or that ``graph`` returns.

    ``known`` maps the names of the graph's inputs to their shapes, for example ``{"data": (32, 3, 224, 224)}``.
    Nothing runs.

    Raises
    ------
    ValueError
        The known shapes contradict the graph, or are too few to infer all others; the message names inputs without one.
        Or the graph has a ``cond`` or ``boolean_mask``, of which MXNet knows no shape before it runs.
    """
    entries = list(dict.fromkeys([*graph.consumers(), *graph.heads]))
    symbol = with_stand_ins(Graph(entries, graph.attrs, numpy=graph.numpy)).to_symbol()
    try:
        found = symbol.infer_shape_partial(**known)[1]
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes {dict(known)} do not fit: {why}") from error
    # Of mx.np networks a scalar has the shape (), and what is not known None.
    known_all = (shape is not None and (shape or graph.numpy) and all(size > 0 for size in shape) for shape in found)
    unknown = [entry.node for entry, is_known in zip(entries, known_all) if not is_known]
    if unknown:
        missing = [node.name for node in unknown if node.name in symbol.list_inputs()]
        dynamic = [node for node in unknown if node.op in _SHAPED_BY_VALUES]
        if dynamic and not missing:
            raise ValueError(
                f"{dynamic[0].name!r} is a {dynamic[0].op}, of which MXNet knows no shape before it runs: tune what is "
                "before and behind it"
            )
        names = [name for name in data_inputs(graph) if name in missing] or missing or [node.name for node in unknown]
        raise ValueError(f"the shapes {dict(known)} do not say the shape of {wanted_shapes(names)}")
    return dict(zip(entries, found))


def cast_bytes(shapes: Mapping[Entry, tuple[int, ...]]) -> dict[Entry, float]:
    """Return, for each tensor of ``shapes``, how many bytes one cast of it reads and writes: 6 for each element.

    A cast from FP32 to a 16-bit dtype reads 4 bytes of each element and writes 2; a cast back reads 2 and writes 4.
    """
    return {entry: 6.0 * prod(shape) for entry, shape in shapes.items()}


def signature(node: Node, shapes: Mapping[Entry, tuple[int, ...]]) -> str:
    """Return a text with an operator's type, parameters and input shapes: ``'Activation {"act_type": "relu"} 8x64'``.

    Operators with equal texts and the same dtype run the same kernel on equally large arrays, so ``Table`` keeps one
    time for all of them. ``shapes`` maps every tensor that ``node`` reads to its shape.
    """
    attrs = {name: value for name, value in sorted(node.attrs.items()) if not name.startswith("__")}
    inputs = ["x".join(map(str, shapes[entry])) for entry in node.inputs]
    return f"{node.op} {json.dumps(attrs)} {' '.join(inputs)}"
