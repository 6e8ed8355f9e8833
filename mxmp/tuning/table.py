"""Times of operators and casts by signature: they come from profiles, are kept on disk, and are the costs of a cut."""

from __future__ import annotations

import json
import statistics
from math import prod
from typing import Any, Collection, Mapping

from ..files import read_json, replacing
from ..precision.graph import Entry, Node
from .choices import Task, signature
from .clock import Cast, Owner
from .cut import Costs

_DAY = 86400.0
_CAST = " -> "  # in the keys of casts only


class Table:
    """Measured seconds of the operators and casts of one task, from which the time of a plan is predicted.

    ``learn`` adds the times that were measured for one plan; ``costs`` and ``predict`` then return those of other
    plans. Operators of equal type, parameters, shapes and dtype share one time, the median of theirs in one profile.
    So do casts of equal shape and direction whose tensors come from, and are read by, operators of equal types.

    An operator keeps the time of the first profile that had one; a cast gets that of the last. ``search.Search`` begins
    with the plan in which all is FP32 and the plan with as much low precision as possible, so operators are measured
    with few casts beside them, or none. Beside a cast an operator may take longer or shorter, because it reads another
    memory layout; this difference is added to the cast. So ``predict`` returns the measured sum for a plan that was
    just learned, unless operators or casts that share a time took different times, or ``costs`` raises the negative
    time of a cast to 0.

    Parameters
    ----------
    task, shapes
        The graph and the plans to choose from, and the shape of every tensor of the graph.
    training : bool
        True if a time is of a forward and a backward, False if of a forward alone. Their keys differ.
    known : dict of str to float
        Times from earlier runs on this machine, with the keys of ``seconds``; empty if there are none. ``learn`` adds
        new times to this dict.

    Attributes
    ----------
    seconds : dict of str to float
        ``known`` itself, with all that was learned. The key of an operator's time is a text such as ``"training relu {}
        8x64 bfloat16"``; the key of a cast's time contains ``" -> "``.
    """

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
        """Return True if every operator and cast of the plan with ``low`` in low precision has a time in the table."""
        operators = all(self._key(node, node in low) in self.seconds for node in self._signatures)
        return operators and all(self._cast_key(Cast(*cast)) in self.seconds for cast in self._task.choice.casts(low))

    def learn(self, low: Collection[Node], profile: Mapping[Owner, float]) -> None:
        """Add the measured seconds of one plan's operators and casts to the table.

        ``low`` are the operators that compute in low precision under the plan. ``profile`` maps each operator and cast
        to its seconds in one step; 0 if it is missing. An operator that has a time in the table keeps it. Where it took
        longer or shorter now, the difference is added in equal shares to the casts of its inputs and outputs
        (``_beside``), or dropped if there are none. A cast that has a time already gets the new one.
        """
        found: dict[str, list[float]] = {}
        for node in self._signatures:
            found.setdefault(self._key(node, node in low), []).append(profile.get(node, 0.0))
        for key, times in found.items():
            self.seconds.setdefault(key, statistics.median(times))
        casts = [Cast(*cast) for cast in self._task.choice.casts(low)]
        extra = dict.fromkeys(casts, 0.0)
        for node, its_casts in self._beside(casts, low).items():
            more = profile.get(node, 0.0) - self.seconds[self._key(node, node in low)]
            for cast in its_casts:
                extra[cast] += more / len(its_casts)
        found = {}
        for cast in casts:
            found.setdefault(self._cast_key(cast), []).append(profile.get(cast, 0.0) + extra[cast])
        self.seconds.update({key: statistics.median(times) for key, times in found.items()})

    def costs(self) -> Costs:
        """Return the costs, in seconds, of all operators and casts of the graph, for ``cut.cheapest``.

        A cast that was not measured costs its number of elements times the median seconds per element of the measured
        casts in its direction (1e-9 if there are none). A negative time of a cast counts as 0 unless the presence of
        the cast depends on one operator alone (``Choice.sole_decider``): a minimum cut allows no other negative cost.
        Raises ``KeyError`` if an operator was not measured in FP32, or if one for which ``tune`` may choose low
        precision was not measured in low precision.
        """
        rates: dict[bool, list[float]] = {True: [], False: []}
        casts = [Cast(e, to_fp32) for e in self._task.choice.tensors for to_fp32 in rates if not e.node.is_variable]
        for cast in casts:
            known = self.seconds.get(self._cast_key(cast))
            if known is not None:
                rates[cast.to_fp32].append(known / prod(self._shapes[cast.entry]))
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
        """Return the seconds of a step with the operators ``low`` in low precision: the sum of all operators and casts.

        The time of a cast that was not measured is estimated from its size and the times of other casts (``costs``).
        Raises ``KeyError`` if an operator was not measured in FP32, or one of ``Task.may_be_low`` in low precision.
        """
        costs = self.costs()
        others = sum(costs.fp32[node] for node in self._signatures if node not in self._task.may_be_low)
        return others + self._task.choice.cost(low, costs)

    def seconds_of(self, node: Node, low: bool) -> float:
        """Return the measured seconds of one operator in low precision, or in FP32 if ``low`` is False.

        Raises ``KeyError`` if the operator was not measured in this dtype.
        """
        return self.seconds[self._key(node, low)]

    def _beside(self, casts: list[Cast], low: Collection[Node]) -> dict[Node, list[Cast]]:
        """Return, for each operator, those of ``casts`` that may change its time.

        They are the casts of its outputs, and of inputs that it reads through the cast when the operators ``low``
        compute in low precision. Operators without such a cast are not in the dict.
        """
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
        """Return the key of an operator's time in ``seconds``, for example ``"training relu {} 8x64 bfloat16"``."""
        return f"{self._signatures[node]} {self._task.policy.compute if low else 'float32'}"

    def _cast_key(self, cast: Cast) -> str:
        """Return the key of a cast's time in ``seconds``: ``"training Convolution -> float32 8x64 -> BatchNorm"``.

        The types at the end are of all operators that read the tensor, also of those that read it without the cast.
        """
        maker = cast.entry.node.op
        readers = sorted({node.op for node, _ in self._readers.get(cast.entry, ())})
        dtype = "float32" if cast.to_fp32 else self._task.policy.compute
        shape = "x".join(map(str, self._shapes[cast.entry]))
        return f"{self._mode} {maker}{_CAST}{dtype} {shape}{_CAST}{' '.join(readers)}"


def read(path: str) -> dict[str, float]:
    """Return the seconds in a file that ``write`` wrote, by the keys of ``Table.seconds``; empty if there is no file.

    Raises ``ValueError`` if the file is no such JSON, or if its times are impossible: one is a day or more, that of an
    operator is below 0, as only that of a cast may be, or those of all operators are 0. Raises ``OSError`` if the file
    exists but cannot be read.
    """
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"it is no JSON of times ({type(error).__name__})") from error
    known = found.get("seconds") if isinstance(found, dict) else None
    # Neither NaN nor infinity is less than a day.
    if not isinstance(known, dict) or not all(type(v) in (int, float) and abs(v) < _DAY for v in known.values()):
        raise ValueError("it does not hold a number of seconds for each operator")
    operators = [value for key, value in known.items() if _CAST not in key]
    if known and not (min(operators, default=0.0) >= 0.0 < max(operators, default=0.0)):
        raise ValueError("its operators take no time, or less than none")
    return {key: float(value) for key, value in known.items()}


def write(path: str, machine: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Write a JSON file with measured times and the machine on which they hold, for ``read``.

    ``seconds`` is ``Table.seconds``, and ``machine`` is what ``machine.describe`` returned. Raises ``OSError``, which
    names ``path``, if the file cannot be written; an older file then stays as it was.
    """
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "seconds": dict(sorted(seconds.items()))}, file, indent=1)
