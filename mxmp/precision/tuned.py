"""How a plan was found by tuning, as plain data that prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Mapping

__all__ = ["CONVERTED", "FULL", "Tuned", "texts"]

# Names of the two plans in which nothing computes low: the graph as it is, and with the workarounds against slow FP32
# kernels.
FULL, CONVERTED = "float32", "float32, converted"


def texts(values: Any) -> tuple[str, ...]:
    """A list of texts from JSON. Raises ``ValueError`` for anything else, and for text that cannot be printed."""
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
    """What was compared, and what came out. Of each candidate, by its name:

    Attributes
    ----------
    chosen : str
        A graph in which nothing computes low runs as it is, unless ``CONVERTED`` is chosen.
    training : bool
        Steps are a forward and a backward; otherwise a forward.
    steps : mapping of str to float
        Seconds of a whole step, the median. Empty where nothing was measured.
    gains : mapping of str to (float, float, float)
        Times as fast as FP32: lower quartile, median and upper quartile over the rounds.
    predicted : mapping of str to float
        The gain that the times of the operators and casts let expect.
    cast_bytes : mapping of str to int
        Bytes that the casts of one forward read and write.
    notes : tuple of str
        What else there is to say: where low precision does not pay, what failed.
    """

    chosen: str
    training: bool
    steps: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    cast_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Tuned:
        """The inverse of ``to_dict``. Raises ``TypeError``, ``ValueError`` or another for anything else."""
        if set(raw) != {f.name for f in fields(cls)} or type(raw["training"]) is not bool:
            raise ValueError(f"'tuned' is {raw!r:.200}")
        (chosen,) = texts([raw["chosen"]])
        gains = _by_name(raw["gains"], _quartiles)
        steps, predicted, moved = (_by_name(raw[name], _number) for name in ("steps", "predicted", "cast_bytes"))
        return cls(chosen, raw["training"], steps, gains, predicted, moved, texts(raw["notes"]))

    def __str__(self) -> str:
        what = "forward and backward" if self.training else "forward"
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
