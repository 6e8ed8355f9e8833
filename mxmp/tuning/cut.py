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
    """What decides whether one tensor is cast, under an assignment as of ``Choice``."""

    source: Node | None  # its operator or variable, whose dtype it has; None: FP32 under every assignment
    readers: tuple[Node, ...]  # that read it in low precision under some assignment, each once
    read_in_fp32: bool  # under every assignment: by an FP32 operator, as a label, as an FP32 output


@dataclass(frozen=True)
class Costs:
    """Costs of operators and casts in one unit, such as seconds; what a mapping lacks costs 0.
    An operator's may be negative, and a cast's that depends on one operator alone, which it makes faster."""

    low: Mapping[Node, float]
    fp32: Mapping[Node, float]
    to_low: Mapping[Entry, float]  # in training with the cast's backward
    to_fp32: Mapping[Entry, float]


class Choice:
    """All assignments of dtypes to a graph's operators: each is the set of the nodes that compute in low precision."""

    def __init__(
        self,
        planned: PlannedGraph,
        free: Collection[Node],
        always_low: Collection[Node] = (),
        may_be_stored_low: Collection[Node] = (),
    ) -> None:
        self.free, self.always_low = frozenset(free), frozenset(always_low)
        # Variables that are low, without a cast, where all their readers are.
        self.may_be_stored_low = frozenset(may_be_stored_low)
        self.may_be_low = low = self.free | self.always_low
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
        """Return the cost of casts and operators under ``low``, without operators that are FP32 in every assignment."""
        nodes = sum((costs.low if node in low else costs.fp32).get(node, 0.0) for node in self.may_be_low)
        return nodes + sum(
            (costs.to_fp32 if to_fp32 else costs.to_low).get(entry, 0.0) for entry, to_fp32 in self.casts(low)
        )

    def sole_decider(self, entry: Entry, to_fp32: bool) -> Node | None:
        """Return the operator that, where it is low and only there, causes this cast; None if several decide."""
        tensor = self.tensors[entry]
        if tensor.source in self.may_be_stored_low:
            return None
        if to_fp32:
            return tensor.source if tensor.read_in_fp32 else None
        return tensor.readers[0] if tensor.source is None and len(tensor.readers) == 1 else None

    def casts(self, low: Collection[Node]) -> Iterator[tuple[Entry, bool]]:
        """Yield each cast under ``low``: the tensor, which has one cast at most, and True if it is to FP32."""
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
    """Return an assignment with exactly the least ``choice.cost``; ``Costs`` says which costs may be negative."""
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
    return network.low_side() & choice.may_be_low


class _Network:
    """A flow network whose minimum cut puts each vertex, any hashable, on the side of ``LOW`` or of ``FP32``."""

    LOW, FP32 = "low", "fp32"

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {self.LOW: 0, self.FP32: 1}
        self._edges: list[tuple[int, ...]] = []
        self._capacities: list[float] = []

    def pay(self, low: Any, fp32: Any, cost: float) -> None:
        """Add a cost to all cuts with ``low`` on the low side and ``fp32`` on the other; ``math.inf`` excludes them."""
        if cost > 0:
            self._edges.append(tuple(self._numbers.setdefault(each, len(self._numbers)) for each in (low, fp32)))
            self._capacities.append(cost)

    def low_side(self) -> frozenset[Any]:
        """Return the vertices on the low side of a minimum cut, ``LOW`` included."""
        try:
            import igraph
        except ImportError as error:
            raise ImportError(f"tuning needs python-igraph ({error}): pip install 'mxmp[tune]'") from error
        most = 1.0 + sum(filter(math.isfinite, self._capacities))  # igraph subtracts flows: inf would become NaN
        graph = igraph.Graph(len(self._numbers), self._edges, directed=True)
        cut = set(graph.mincut(0, 1, [min(capacity, most) for capacity in self._capacities]).partition[0])
        return frozenset(what for what, number in self._numbers.items() if number in cut)
