"""What tuning compared to find a plan and what it measured, as plain data that prints as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Mapping

# Names of the two candidates in which everything computes in FP32: the graph as it is, and with the workarounds against
# slow kernels.
FULL, CONVERTED = "float32", "float32, converted"


def texts(values: Any) -> tuple[str, ...]:
    """Return a tuple of the strings in ``values``, a list read from JSON; raise ``ValueError`` for anything else.

    A list with a string that cannot be encoded in UTF-8 is refused too: JSON can hold half a surrogate pair.
    """
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts, got {values!r:.200}")
    "".join(values).encode()  # JSON may hold half a character
    return tuple(values)


def _number(value: Any) -> Any:
    """Return ``value``, read from JSON, if it is a finite int or float and no bool; else raise ``ValueError``."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.200}")
    return value


def _quartiles(values: Any) -> tuple[float, float, float]:
    """Return three numbers read from JSON (lower quartile, median, upper quartile) as a tuple.

    Raises ``OverflowError``, ``TypeError`` or ``ValueError`` for anything else.
    """
    low, middle, high = map(_number, values)
    return low, middle, high


def _by_name(values: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a dict that was read from JSON, with ``read(value)``, which may raise, for each value."""
    return dict(zip(texts(list(values)), map(read, values.values())))


@dataclass(frozen=True)
class Tuned:
    """The ways to run a network that ``mxmp.tune`` compared, what it measured of each, and which one it chose.

    Each of these ways, below called candidates, has a name: ``"float32"`` is the FP32 graph as it is,
    ``"float32, converted"`` the FP32 graph with the workarounds against slow kernels, ``"rules"`` the plan that the
    rules make. All others, such as ``"least time"``, are plans that tuning itself made.

    Attributes
    ----------
    chosen : str
        The name of the candidate that tuning chose.
    training : bool
        Whether a forward and a backward were timed; otherwise a forward alone.
    steps : mapping of str to float
        From each candidate that was timed to the median time of its steps, in seconds. Empty if nothing was timed.
    gains : mapping of str to (float, float, float)
        From each candidate in ``steps`` to how many times as fast as ``"float32"`` it was: lower quartile, median and
        upper quartile over the rounds of timing. All three are 1 for ``"float32"`` itself.
    predicted : mapping of str to float
        From a candidate to how many times as fast as ``"float32"`` it should be, by the sum of the times of its
        operators and casts; 1 for ``"float32"`` itself. Left out are ``"float32, converted"`` and each candidate of
        which one of these times was not measured.
    cast_bytes : mapping of str to int
        From a candidate to the bytes that its casts read and write in one forward. ``"float32, converted"`` is left
        out; so is ``"float32"`` if ``mxmp.tune`` was called with ``measure=False``.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict that ``json.dumps`` accepts."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Tuned:
        """Return the ``Tuned`` whose ``to_dict()`` was written to JSON and read again as ``raw``.

        Raises ``AttributeError``, ``OverflowError``, ``TypeError`` or ``ValueError`` for anything else. A dict straight
        from ``to_dict`` is refused, as its ``notes`` are still a tuple.
        """
        if set(raw) != {f.name for f in fields(cls)} or type(raw["training"]) is not bool:
            raise ValueError(f"'tuned' is {raw!r:.200}")
        (chosen,) = texts([raw["chosen"]])
        gains = _by_name(raw["gains"], _quartiles)
        steps, predicted, moved = (_by_name(raw[name], _number) for name in ("steps", "predicted", "cast_bytes"))
        return cls(chosen, raw["training"], steps, gains, predicted, moved, texts(raw["notes"]))

    def __str__(self) -> str:
        """Return a table with one line for each candidate, ``*`` before the chosen one, and ``notes`` below it."""
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
