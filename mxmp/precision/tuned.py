"""What tuning compared to find a plan and what it measured, as plain data that prints as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Mapping

# Names of the two candidates in which everything computes in FP32: the graph as it is, and with the workarounds against
# slow kernels.
FULL, CONVERTED = "float32", "float32, converted"


def texts(values: Any) -> tuple[str, ...]:
    """Return a list of texts, read from JSON, as a tuple; raise ``ValueError`` for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts, got {values!r:.200}")
    "".join(values).encode()  # JSON may hold half a character
    return tuple(values)


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.200}")
    return value


def _quartiles(values: Any) -> tuple[float, float, float]:
    low, middle, high = map(_number, values)
    return low, middle, high


def _by_name(values: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return dict(zip(texts(list(values)), map(read, values.values())))


@dataclass(frozen=True)
class Tuned:
    """The ways to run a network that ``mxmp.tune`` compared, what it measured of each, and which one it chose.

    Each way, a candidate, has a name: ``"float32"`` is the FP32 graph as it is, ``"float32, converted"`` the FP32 graph
    with the workarounds against slow kernels, ``"rules"`` the plan of the rules. All others, such as ``"least time"``,
    tuning made.

    Attributes
    ----------
    chosen : str
        The candidate that tuning chose.
    training : bool
        Whether training was timed; otherwise inference.
    steps : mapping of str to float
        The median time of a step in seconds, for each candidate that was timed. A step copies a batch from NumPy and
        runs a forward; in training it also runs a backward, checks the gradients, and updates the weights.
    gains : mapping of str to (float, float, float)
        How many times as fast as ``"float32"`` each candidate in ``steps`` was: lower quartile, median and upper
        quartile over the rounds of timing. All three are 1 for ``"float32"`` itself.
    predicted : mapping of str to float
        How many times as fast as ``"float32"`` a candidate should be by the sum of the times of its operators and
        casts. Left out are ``"float32, converted"`` and each candidate of which one of these times was not measured.
    cast_bytes : mapping of str to int
        The bytes that a candidate's casts read and write in one forward. ``"float32, converted"`` is left out; so is
        ``"float32"`` if ``mxmp.tune`` was called with ``measure=False``.
    notes : tuple of str
        Remarks for the user: where low precision does not pay, what failed.
    """

    chosen: str
    training: bool
    steps: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    cast_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def converts(self) -> bool:
        """Return whether the FP32 graph with workarounds was chosen."""
        return self.chosen == CONVERTED

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict that ``json.dumps`` accepts."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Tuned:
        """Return what ``to_dict`` wrote to JSON; raise Attribute-, Overflow-, Type- or ValueError for anything else."""
        if set(raw) != {f.name for f in fields(cls)} or type(raw["training"]) is not bool:
            raise ValueError(f"'tuned' is {raw!r:.200}")
        (chosen,) = texts([raw["chosen"]])
        gains = _by_name(raw["gains"], _quartiles)
        steps, predicted, moved = (_by_name(raw[name], _number) for name in ("steps", "predicted", "cast_bytes"))
        return cls(chosen, raw["training"], steps, gains, predicted, moved, texts(raw["notes"]))

    def __str__(self) -> str:
        """Return a table with one line for each candidate, ``*`` before the chosen one, and ``notes`` below it."""
        what = "training step" if self.training else "inference"
        names = list(dict.fromkeys([*self.steps, *self.cast_bytes]))
        rows = [["", f"{what}, ms", "times as fast as FP32", "predicted", "MiB cast"]]
        for name in names:
            low, middle, high = self.gains.get(name, (0.0, 0.0, 0.0))
            rows.append(
                [
                    f"{'*' if name == self.chosen else ' '} {name}",
                    f"{1e3 * self.steps[name]:.1f}" if name in self.steps else "",
                    f"{middle:.2f} ({low:.2f} to {high:.2f})" if name in self.gains else "",
                    f"{self.predicted[name]:.2f}" if name in self.predicted else "",
                    f"{self.cast_bytes[name] / 2**20:.1f}" if name in self.cast_bytes else "",
                ]
            )
        kept = [i for i in range(5) if i == 0 or any(row[i] for row in rows[1:])]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
