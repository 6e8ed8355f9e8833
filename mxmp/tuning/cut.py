"""The assignment of dtypes with the least total cost, exactly: a minimum cut.

Every operator that may compute in either dtype is on one side of the cut, low or FP32, and pays its cost there. A
tensor that is returned on one side and read on the other is cast: once, for any number of readers, as
``casts.insert_casts`` does. Kolmogorov and Zabih (PAMI 2004) say which such sums a cut can minimise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Iterator, Mapping, NamedTuple

from ..precision.graph import Entry, Node
from ..precision.plan import PlannedGraph

__all__ = ["Choice", "Costs", "Tensor", "least"]


class Tensor(NamedTuple):
    """The operator that returns a tensor, and those that read it.

    Attributes
    ----------
    source : Node or None
        The tensor is low where this one is; None where it is FP32 under every assignment.
    readers : tuple of Node
        The operators that read it in the dtype that they compute in.
    full : bool
        Whether it is read in FP32 under every assignment too.
    """

    source: Node | None
    readers: tuple[Node, ...]
    full: bool


@dataclass(frozen=True)
class Costs:
    """The cost of each choice, in any one unit; 0 for those that are not in the mappings.

    An operator may have a negative cost, and so may a cast on which one operator alone decides (``Choice.decides``):
    the operators around it gain more than the cast costs.

    Attributes
    ----------
    low, full : mapping of Node to float
        Of operators.
    to_low, to_full : mapping of Entry to float
        Of the cast of a tensor, forward and backward.
    """

    low: Mapping[Node, float]
    full: Mapping[Node, float]
    to_low: Mapping[Entry, float]
    to_full: Mapping[Entry, float]


class Choice:
    """The assignments that are possible in a graph.

    Attributes
    ----------
    free : frozenset of Node
        The operators that may compute in either dtype.
    fixed : frozenset of Node
        The operators that compute low under every assignment; all others compute in FP32.
    stored : frozenset of Node
        The variables that are stored low where all their readers are low.
    tensors : dict of Entry to Tensor
    """

    def __init__(
        self,
        planned: PlannedGraph,
        free: Collection[Node],
        fixed: Collection[Node] = (),
        stored: Collection[Node] = (),
    ) -> None:
        self.free, self.fixed, self.stored = frozenset(free), frozenset(fixed), frozenset(stored)
        self._either = self.free | self.fixed
        heads = set(planned.graph.heads) if planned.plan.policy.output == "float32" else set()
        readers = planned.graph.consumers()
        self.tensors = {
            entry: self._tensor(planned, entry, readers.get(entry, []), entry in heads)
            for entry in dict.fromkeys([*readers, *planned.graph.heads])
        }

    def _tensor(self, planned: PlannedGraph, entry: Entry, users: list[tuple[Node, int]], head: bool) -> Tensor:
        node = entry.node
        follows = [node for node, position in users if self._reads(planned, node, position)]
        made = node in self.stored or (node in self._either and entry.index not in planned.rules[node].keep_outputs)
        return Tensor(node if made else None, tuple(dict.fromkeys(follows)), head or len(follows) < len(users))

    def _reads(self, planned: PlannedGraph, node: Node, position: int) -> bool:
        return node in self._either and position not in planned.rules[node].keep

    def cost(self, low: Collection[Node], costs: Costs) -> float:
        """Return the cost of the assignment in which ``low``, and nothing else, computes low."""
        nodes = sum((costs.low if node in low else costs.full).get(node, 0.0) for node in self._either)
        return nodes + sum(
            (costs.to_full if to_full else costs.to_low).get(entry, 0.0) for entry, to_full in self.casts(low)
        )

    def decides(self, entry: Entry, to_full: bool) -> Node | None:
        """Return the operator that decides alone whether a tensor is cast so; None if several do, or none.

        The tensor is cast where that operator computes low.
        """
        tensor = self.tensors[entry]
        if tensor.source in self.stored:
            return None
        if to_full:
            return tensor.source if tensor.full else None
        return tensor.readers[0] if tensor.source is None and len(tensor.readers) == 1 else None

    def casts(self, low: Collection[Node]) -> Iterator[tuple[Entry, bool]]:
        """Yield the tensors that are cast, and whether to FP32."""
        for entry, tensor in self.tensors.items():
            is_low = [node in low for node in tensor.readers]
            if tensor.source in self.stored:
                made_low = all(is_low) and not tensor.full
            else:
                made_low = tensor.source is not None and tensor.source in low
            if made_low and (tensor.full or not all(is_low)):
                yield entry, True
            if not made_low and any(is_low):
                yield entry, False


def least(choice: Choice, costs: Costs) -> frozenset[Node]:
    """Return the operators that compute low in the assignment with the least total cost.

    Raises
    ------
    ValueError
        A cast has a negative cost, and several operators decide on it.
    ImportError
        python-igraph, which finds the cut, is not installed.
    """
    network = _Network()
    extra = {node: costs.low.get(node, 0.0) - costs.full.get(node, 0.0) for node in choice.free}
    for to_full, of_casts in ((True, costs.to_full), (False, costs.to_low)):
        for entry, cost in of_casts.items():
            node = choice.decides(entry, to_full)
            if node in extra:
                extra[node] += cost
            elif cost < 0 and node is None:
                raise ValueError(f"{entry.node.name}: a cast on which several operators decide costs {cost}")
    for node, more in extra.items():
        network.pay(node, network.FULL, more)
        network.pay(network.LOW, node, -more)
    for node in choice.fixed:
        network.forbid(network.LOW, node)
    for entry, tensor in choice.tensors.items():
        source = network.FULL if tensor.source is None else tensor.source
        if tensor.source in choice.stored:
            for reader in [*tensor.readers, *([network.FULL] if tensor.full else [])]:
                network.forbid(source, reader)
        elif tensor.source is not None and choice.decides(entry, True) is None:
            cast = (entry, "to FP32")
            network.pay(source, cast, costs.to_full.get(entry, 0.0))
            for reader in tensor.readers:
                network.forbid(cast, reader)
        if choice.decides(entry, False) is None:
            cast = (entry, "to low")
            network.pay(cast, source, costs.to_low.get(entry, 0.0))
            for reader in tensor.readers:
                network.forbid(reader, cast)
    return network.side_of_low() & (choice.free | choice.fixed)


class _Network:
    """A network of capacities: ``pay`` a cost where the first is low and the second in FP32, or ``forbid`` it."""

    LOW, FULL = "low", "full"

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {self.LOW: 0, self.FULL: 1}
        self._edges: list[tuple[int, int]] = []
        self._capacities: list[float | None] = []

    def pay(self, low: Any, full: Any, cost: float) -> None:
        if cost > 0:
            self._add(low, full, cost)

    def forbid(self, low: Any, full: Any) -> None:
        self._add(low, full, None)

    def side_of_low(self) -> frozenset[Any]:
        """Return everything that is on the low side of a minimum cut."""
        try:
            import igraph
        except ImportError as error:
            raise ImportError(f"tuning needs python-igraph ({error}): pip install 'mxmp[tune]'") from error
        most = 1.0 + sum(filter(None, self._capacities))
        graph = igraph.Graph(len(self._numbers), self._edges, directed=True)
        capacities = [most if capacity is None else capacity for capacity in self._capacities]
        cut = set(graph.mincut(0, 1, capacities).partition[0])
        return frozenset(what for what, number in self._numbers.items() if number in cut)

    def _add(self, low: Any, full: Any, capacity: float | None) -> None:
        numbers = (self._numbers.setdefault(each, len(self._numbers)) for each in (low, full))
        first, second = numbers
        self._edges.append((first, second))
        self._capacities.append(capacity)
