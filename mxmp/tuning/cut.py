"""The assignment of dtypes with the least total cost, exactly: a minimum cut.

Every operator that may compute in either dtype is on one side of the cut, low precision or FP32, and pays its cost
there. A tensor that is returned on one side and read on the other is cast: once, for any number of readers, as
``casts.insert_casts`` does. Kolmogorov and Zabih (PAMI 2004) say which such sums a cut can minimise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Collection, Iterator, Mapping, NamedTuple

from ..precision.graph import Entry, Node
from ..precision.plan import PlannedGraph


class Tensor(NamedTuple):
    """What decides whether one tensor of a graph is cast: the node that it comes from, and the operators that read it.

    An assignment, as of ``Choice``, says which operators compute in low precision.

    Attributes
    ----------
    source : Node or None
        The operator that returns the tensor, or the variable that holds it, and whose dtype the tensor has. None where
        the tensor is FP32 under every assignment.
    readers : tuple of Node
        The operators that read the tensor in low precision under some assignment; each once.
    read_in_fp32 : bool
        True if something reads the tensor in FP32 under every assignment: an operator that always computes in FP32, an
        input such as a label that is always FP32, or the graph's outputs where the policy returns FP32.
    """

    source: Node | None
    readers: tuple[Node, ...]
    read_in_fp32: bool


@dataclass(frozen=True)
class Costs:
    """What each operator costs in each dtype, and each tensor's cast in each direction.

    All costs are in one unit, for example seconds or bytes. An operator or tensor that a mapping lacks costs 0 there.
    The cost of an operator may be negative, and so may the cost of a cast whose presence depends on one operator alone
    (``Choice.sole_decider``): the time of a cast that makes the operators beside it faster can be less than 0.

    Attributes
    ----------
    low, fp32 : mapping of Node to float
        The cost of each operator when it computes in low precision, and when it computes in FP32.
    to_low, to_fp32 : mapping of Entry to float
        The cost of casting each tensor to low precision, and to FP32, in a step: in training with the cast's backward.
    """

    low: Mapping[Node, float]
    fp32: Mapping[Node, float]
    to_low: Mapping[Entry, float]
    to_fp32: Mapping[Entry, float]


class Choice:
    """All assignments of dtypes to the operators of one graph among which ``cheapest`` chooses, and the casts of each.

    An assignment is a set of nodes: the operators that compute in low precision. All other operators compute in FP32.
    ``planned`` is the graph with the rule of each operator; the decisions of its plan are not read.

    Attributes
    ----------
    free, always_low : frozenset of Node
        The operators that compute in low precision under some assignments, and those that do so under every one. All
        others compute in FP32 under every assignment.
    may_be_stored_low : frozenset of Node
        The variables (weights, biases) that are stored in low precision under those assignments in which all
        operators that read them compute in low precision. Then they need no cast.
    tensors : dict of Entry to Tensor
        Every tensor that an operator reads or that the graph returns, with what decides whether it is cast.
    """

    def __init__(
        self,
        planned: PlannedGraph,
        free: Collection[Node],
        always_low: Collection[Node] = (),
        may_be_stored_low: Collection[Node] = (),
    ) -> None:
        self.free, self.always_low = frozenset(free), frozenset(always_low)
        self.may_be_stored_low = frozenset(may_be_stored_low)
        self._low_somewhere = low = self.free | self.always_low
        fp32_heads = set(planned.graph.heads) if planned.plan.policy.output == "float32" else set()
        consumers, rules = planned.graph.consumers(), planned.rules
        self.tensors = {}
        for entry in dict.fromkeys([*consumers, *planned.graph.heads]):
            node, users = entry.node, consumers.get(entry, [])
            readers = [user for user, i in users if user in low and i not in rules[user].keep]
            computed_low = node in low and entry.index not in rules[node].keep_outputs
            source = node if computed_low or node in self.may_be_stored_low else None
            read_in_fp32 = entry in fp32_heads or len(readers) < len(users)
            self.tensors[entry] = Tensor(source, tuple(dict.fromkeys(readers)), read_in_fp32)

    def cost(self, low: Collection[Node], costs: Costs) -> float:
        """Return the total cost of casts and operators when the operators ``low`` compute in low precision.

        Operators that compute in FP32 under every assignment are left out, since their cost is always the same.
        """
        nodes = sum((costs.low if node in low else costs.fp32).get(node, 0.0) for node in self._low_somewhere)
        return nodes + sum(
            (costs.to_fp32 if to_fp32 else costs.to_low).get(entry, 0.0) for entry, to_fp32 in self.casts(low)
        )

    def sole_decider(self, entry: Entry, to_fp32: bool) -> Node | None:
        """Return the operator whose dtype alone decides whether a tensor is cast; None if there is no such operator.

        The graph has the cast of ``entry``, to FP32 or to low precision, under exactly those assignments in which the
        returned operator computes in low precision. ``cheapest`` adds the cost of the cast to that of the operator in
        low precision; the cost of a cast without a sole decider must not be negative.
        """
        tensor = self.tensors[entry]
        if tensor.source in self.may_be_stored_low:
            return None
        if to_fp32:
            return tensor.source if tensor.read_in_fp32 else None
        return tensor.readers[0] if tensor.source is None and len(tensor.readers) == 1 else None

    def casts(self, low: Collection[Node]) -> Iterator[tuple[Entry, bool]]:
        """Yield each cast under the assignment ``low``: the tensor, and True if to FP32, False if to low precision.

        A tensor has at most one cast, however many operators read it.
        """
        for entry, tensor in self.tensors.items():
            is_low = [node in low for node in tensor.readers]
            if tensor.source in self.may_be_stored_low:
                made_low = all(is_low) and not tensor.read_in_fp32
            else:
                made_low = tensor.source is not None and tensor.source in low
            if made_low and (tensor.read_in_fp32 or not all(is_low)):
                yield entry, True
            if not made_low and any(is_low):
                yield entry, False


def cheapest(choice: Choice, costs: Costs) -> frozenset[Node]:
    """Return the assignment of dtypes with the least total cost: the operators that compute in low precision.

    It is the exact minimum of ``choice.cost`` over all assignments of ``choice``, found by a minimum cut; of several
    with this cost, any of them. The operators of ``choice.always_low`` are in it.

    Raises
    ------
    ValueError
        A cast whose presence depends on several operators has a negative cost; a cut cannot minimise such a sum.
    ImportError
        python-igraph, which finds the cut, is not installed.
    """
    network = _Network()
    extra = {node: costs.low.get(node, 0.0) - costs.fp32.get(node, 0.0) for node in choice.free}
    for to_fp32, cast_costs in ((True, costs.to_fp32), (False, costs.to_low)):
        for entry, cost in cast_costs.items():
            node = choice.sole_decider(entry, to_fp32)
            if node in extra:
                extra[node] += cost
            elif cost < 0 and node is None:
                raise ValueError(f"{entry.node.name}: a cast on which several operators decide costs {cost}")
    for node, more in extra.items():
        network.pay(node, network.FP32, more)
        network.pay(network.LOW, node, -more)
    for node in choice.always_low:
        network.pay(network.LOW, node, math.inf)
    for entry, tensor in choice.tensors.items():
        source = network.FP32 if tensor.source is None else tensor.source
        if tensor.source in choice.may_be_stored_low:
            for reader in [*tensor.readers, *([network.FP32] if tensor.read_in_fp32 else [])]:
                network.pay(source, reader, math.inf)
        elif tensor.source is not None and choice.sole_decider(entry, True) is None:
            cast = (entry, "to FP32")
            network.pay(source, cast, costs.to_fp32.get(entry, 0.0))
            for reader in tensor.readers:
                network.pay(cast, reader, math.inf)
        if choice.sole_decider(entry, False) is None:
            cast = (entry, "to low")
            network.pay(cast, source, costs.to_low.get(entry, 0.0))
            for reader in tensor.readers:
                network.pay(reader, cast, math.inf)
    return network.low_side() & (choice.free | choice.always_low)


class _Network:
    """A flow network whose minimum cut puts each of its vertices on the low-precision side or on the FP32 side.

    A vertex is any hashable object: an operator, a cast, or one of the two ends ``LOW`` and ``FP32``, which are always
    on their own sides.
    """

    LOW, FP32 = "low", "fp32"

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {self.LOW: 0, self.FP32: 1}
        self._edges: list[tuple[int, ...]] = []
        self._capacities: list[float] = []

    def pay(self, low: Any, fp32: Any, cost: float) -> None:
        """Add ``cost`` to every cut that has vertex ``low`` on the low-precision side and ``fp32`` on the FP32 side.

        A cost of 0 or less adds nothing, ``math.inf`` excludes these cuts.
        """
        if cost > 0:
            self._edges.append(tuple(self._numbers.setdefault(each, len(self._numbers)) for each in (low, fp32)))
            self._capacities.append(cost)

    def low_side(self) -> frozenset[Any]:
        """Return all vertices on the low-precision side of a minimum cut, ``LOW`` included."""
        try:
            import igraph
        except ImportError as error:
            raise ImportError(f"tuning needs python-igraph ({error}): pip install 'mxmp[tune]'") from error
        most = 1.0 + sum(filter(math.isfinite, self._capacities))  # igraph subtracts flows: inf would become NaN
        graph = igraph.Graph(len(self._numbers), self._edges, directed=True)
        cut = set(graph.mincut(0, 1, [min(capacity, most) for capacity in self._capacities]).partition[0])
        return frozenset(what for what, number in self._numbers.items() if number in cut)
