"""Times of operators and casts by signature: they come from profiles, are kept on disk, and are the costs of a cut.

Operators of equal type, parameters, shapes and dtype share one time, and so do casts between equal types. An operator
keeps its first time, of a plan with few casts. Beside a cast it may read another memory layout and take longer or
shorter: the difference counts for the cast, which has the time of its last profile.
"""

from __future__ import annotations

import statistics
from math import prod
from typing import Collection, Mapping

from ..precision.graph import Entry, Node
from .choices import Task, signature
from .clock import Cast, Owner
from .cut import Costs
from .machine import CAST


class Table:
    """The seconds of one task's operators and casts; ``seconds`` is ``known`` itself, with all that was learned."""

    def __init__(
        self, task: Task, shapes: Mapping[Entry, tuple[int, ...]], training: bool, known: dict[str, float]
    ) -> None:
        self.seconds = known
        self._task, self._shapes = task, shapes
        self._readers = task.graph.consumers()
        self._mode = mode = "training" if training else "inference"
        self._signatures = {
            node: f"{mode} {signature(node, shapes)}" for node in task.graph.nodes() if not node.is_variable
        }

    def knows(self, low: Collection[Node]) -> bool:
        """Return True if every operator and cast of the plan of ``low`` has a time."""
        operators = all(self._key(node, node in low) in self.seconds for node in self._signatures)
        return operators and all(self._cast_key(Cast(*cast)) in self.seconds for cast in self._task.choice.casts(low))

    def learn(self, low: Collection[Node], profile: Mapping[Owner, float]) -> None:
        """Add a profile: seconds of operators and casts in a step of the plan of ``low``; what is missing took 0."""
        found: dict[str, list[float]] = {}
        for node in self._signatures:
            found.setdefault(self._key(node, node in low), []).append(profile.get(node, 0.0))
        for key, times in found.items():
            self.seconds.setdefault(key, statistics.median(times))
        casts = [Cast(*cast) for cast in self._task.choice.casts(low)]
        extra = dict.fromkeys(casts, 0.0)
        for node, its_casts in self._beside(casts, low).items():
            more = profile.get(node, 0.0) - self.seconds[self._key(node, node in low)]
            for cast in its_casts:  # in equal shares
                extra[cast] += more / len(its_casts)
        found = {}
        for cast in casts:
            found.setdefault(self._cast_key(cast), []).append(profile.get(cast, 0.0) + extra[cast])
        self.seconds.update({key: statistics.median(times) for key, times in found.items()})

    def costs(self) -> Costs:
        """Return all costs in seconds; ``KeyError`` if an operator was not measured in a dtype that it may have."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        casts = [Cast(e, to_fp32) for e in self._task.choice.tensors for to_fp32 in rates if not e.node.is_variable]
        for cast in casts:
            known = self.seconds.get(self._cast_key(cast))
            if known is not None:
                rates[cast.to_fp32].append(known / prod(self._shapes[cast.entry]))
        # What was not measured: by its size. Below 0 only where one operator decides, as a cut allows no other.
        usual = {to_fp32: max(statistics.median(each), 0.0) if each else 1e-9 for to_fp32, each in rates.items()}

        def cost_of_cast(entry: Entry, to_fp32: bool) -> float:
            cost = self.seconds.get(self._cast_key(Cast(entry, to_fp32)), usual[to_fp32] * prod(self._shapes[entry]))
            return cost if self._task.choice.sole_decider(entry, to_fp32) else max(cost, 0.0)

        tensors = self._task.choice.tensors
        return Costs(
            {node: self.seconds[self._key(node, True)] for node in self._task.may_be_low},
            {node: self.seconds[self._key(node, False)] for node in self._signatures},
            {entry: cost_of_cast(entry, False) for entry in tensors},
            {entry: cost_of_cast(entry, True) for entry in tensors},
        )

    def predict(self, low: Collection[Node]) -> float:
        """Return the seconds of a step of the plan of ``low``: the sum of all operators and casts, as ``costs``."""
        costs = self.costs()
        others = sum(costs.fp32[node] for node in self._signatures if node not in self._task.may_be_low)
        return others + self._task.choice.cost(low, costs)

    def seconds_of(self, node: Node, low: bool) -> float:
        return self.seconds[self._key(node, low)]

    def _beside(self, casts: list[Cast], low: Collection[Node]) -> dict[Node, list[Cast]]:
        """Return, by operator, the casts that may change its time: of its outputs, and of inputs read through them."""
        beside: dict[Node, list[Cast]] = {}
        rules = self._task.rule_of_node
        for cast in casts:
            readers = {
                node
                for node, position in self._readers.get(cast.entry, ())
                if (node in low and position not in rules[node].keep) is not cast.to_fp32
            }
            for node in [*readers, cast.entry.node]:
                if not node.is_variable:
                    beside.setdefault(node, []).append(cast)
        return beside

    def _key(self, node: Node, low: bool) -> str:
        """Return such as ``"training relu {} 8x64 bfloat16"``."""
        return f"{self._signatures[node]} {self._task.policy.compute if low else 'float32'}"

    def _cast_key(self, cast: Cast) -> str:
        """Return such as ``"training Convolution -> float32 8x64 -> BatchNorm"``, with all readers, cast or not."""
        maker = cast.entry.node.op
        readers = sorted({node.op for node, _ in self._readers.get(cast.entry, ())})
        dtype = "float32" if cast.to_fp32 else self._task.policy.compute
        shape = "x".join(map(str, self._shapes[cast.entry]))
        return f"{self._mode} {maker}{CAST}{dtype} {shape}{CAST}{' '.join(readers)}"
