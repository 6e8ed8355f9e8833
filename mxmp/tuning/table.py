"""Times of operators and casts by signature: they come from profiles, are kept on disk, and are the costs of a cut."""

from __future__ import annotations

import json
import statistics
from math import prod
from typing import Any, Collection, Mapping

from ..files import replacing
from ..precision.graph import Entry, Node
from .choices import Task, signature
from .clock import Cast, Owner
from .cut import Costs

__all__ = ["Table", "read", "write"]


_DAY = 86400.0
_CAST = " -> "  # in the keys of casts, whose seconds may be negative: the operators beside one may gain more


class Table:
    """Seconds of operators by type, attributes, shapes and dtype; of casts by shape, source and readers.

    The time of an operator is that in a graph of one dtype: in FP32 where everything is, low where everything is low
    that may be. The difference to its time beside a cast, whose layout it reads there, belongs to that cast. So
    ``predict`` gives the measured times of the plans that were profiled, but for differences between operators of one
    signature.
    """

    def __init__(
        self, task: Task, shapes: Mapping[Entry, tuple[int, ...]], training: bool, known: dict[str, float]
    ) -> None:
        self.seconds = known
        self._task = task
        self._shapes = shapes
        self._readers = task.graph.consumers()
        mode = "training" if training else "inference"
        self._signatures = {
            node: f"{mode} {signature(node, shapes)}" for node in task.graph.nodes() if not node.is_variable
        }
        self._mode = mode

    def knows(self, low: Collection[Node]) -> bool:
        """Return whether the time of every operator and cast of a plan was measured."""
        operators = all(self._key(node, node in low) in self.seconds for node in self._signatures)
        return operators and all(self._cast_key(Cast(*cast)) in self.seconds for cast in self._task.choice.casts(low))

    def learn(self, low: Collection[Node], profile: Mapping[Owner, float]) -> None:
        """Add the times of a plan's parts."""
        found: dict[str, list[float]] = {}
        for node in self._signatures:
            found.setdefault(self._key(node, node in low), []).append(profile.get(node, 0.0))
        for key, times in found.items():
            self.seconds.setdefault(key, statistics.median(times))
        casts = [Cast(*cast) for cast in self._task.choice.casts(low)]
        extra = dict.fromkeys(casts, 0.0)
        beside = self._beside(casts, low)
        for node, its_casts in beside.items():
            more = profile.get(node, 0.0) - self.seconds[self._key(node, node in low)]
            for cast in its_casts:
                extra[cast] += more / len(its_casts)
        found = {}
        for cast in casts:
            found.setdefault(self._cast_key(cast), []).append(profile.get(cast, 0.0) + extra[cast])
        self.seconds.update({key: statistics.median(times) for key, times in found.items()})

    def costs(self) -> Costs:
        """Return the costs for the cut.

        A cast that no profiled plan has costs as much per byte as others of its direction. A cast with a negative cost
        is free, unless one operator alone decides on it.
        """
        rates: dict[bool, list[float]] = {True: [], False: []}
        casts = [Cast(e, to_full) for e in self._task.choice.tensors for to_full in rates if not e.node.is_variable]
        for cast in casts:
            known = self.seconds.get(self._cast_key(cast))
            if known is not None:
                rates[cast.to_full].append(known / prod(self._shapes[cast.entry]))
        usual = {to_full: max(statistics.median(each), 0.0) if each else 1e-9 for to_full, each in rates.items()}

        def of(entry: Entry, to_full: bool) -> float:
            cost = self.seconds.get(self._cast_key(Cast(entry, to_full)), usual[to_full] * prod(self._shapes[entry]))
            return cost if self._task.choice.decides(entry, to_full) else max(cost, 0.0)

        tensors = self._task.choice.tensors
        return Costs(
            {node: self.seconds[self._key(node, True)] for node in self._task.wide},
            {node: self.seconds[self._key(node, False)] for node in self._signatures},
            {entry: of(entry, False) for entry in tensors},
            {entry: of(entry, True) for entry in tensors},
        )

    def predict(self, low: Collection[Node]) -> float:
        """Return the seconds of a step."""
        costs = self.costs()
        others = sum(costs.full[node] for node in self._signatures if node not in self._task.wide)
        return others + self._task.choice.cost(low, costs)

    def of_node(self, node: Node, low: bool) -> float:
        """Return the seconds of one operator."""
        return self.seconds[self._key(node, low)]

    def _beside(self, casts: list[Cast], low: Collection[Node]) -> dict[Node, list[Cast]]:
        """Return the operators that return a tensor that is cast, or read the cast, with these casts."""
        beside: dict[Node, list[Cast]] = {}
        rules = self._task.rules_of
        for cast in casts:
            maker = cast.entry.node
            readers = {
                node
                for node, position in self._readers.get(cast.entry, ())
                if (node in low and position not in rules[node].keep) is not cast.to_full
            }
            for node in [*readers, maker]:
                if not node.is_variable:
                    beside.setdefault(node, []).append(cast)
        return beside

    def _key(self, node: Node, low: bool) -> str:
        return f"{self._signatures[node]} {self._task.policy.compute if low else 'float32'}"

    def _cast_key(self, cast: Cast) -> str:
        maker = cast.entry.node.op
        readers = sorted({node.op for node, _ in self._readers.get(cast.entry, ())})
        dtype = "float32" if cast.to_full else self._task.policy.compute
        shape = "x".join(map(str, self._shapes[cast.entry]))
        return f"{self._mode} {maker}{_CAST}{dtype} {shape}{_CAST}{' '.join(readers)}"


def read(path: str) -> dict[str, float]:
    """Return the seconds that ``write`` wrote; none where there is no file.

    Raises
    ------
    ValueError
        The file holds something else, or impossible times.
    OSError
        The file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON of times ({type(error).__name__})") from error
    known = found.get("seconds") if isinstance(found, dict) else None
    if not isinstance(known, dict) or not all(_is_time(value) for value in known.values()):
        raise ValueError("it does not hold a number of seconds for each operator")
    operators = [value for key, value in known.items() if _CAST not in key]
    if known and not (min(operators, default=0.0) >= 0.0 < max(operators, default=0.0)):
        raise ValueError("its operators take no time, or less than none")
    return {key: float(value) for key, value in known.items()}


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _DAY  # neither NaN nor infinity is


def write(path: str, machine: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Write these seconds, with the description of the machine; the file appears complete or not at all."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "seconds": dict(sorted(seconds.items()))}, file, indent=1)
