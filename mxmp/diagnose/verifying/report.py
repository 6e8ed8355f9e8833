"""The result of ``verify``, as plain data, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..text import section, some
from .judging import Departure


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found. ``print`` it. Plain data.

    Attributes
    ----------
    right : bool or None
        True: the port trains as plain MXNet does, and what low precision changes is within the noise of one rounding.
        False: one of the two is not so. None: nothing can be said; ``verdict`` says why.
    verdict : str
        The answer, in one or two sentences.
    reasons : tuple of str
        What fits a port that is not right, the likeliest first.
    said : tuple of str
        What mxmp has warned of in the port and not in the plain run.
    written : tuple of str
        The files that a run has written outside the current folder, and so not in its own copy of it.
    departure : Departure or None
        Where the run through mxmp in FP32 leaves the plain run.
    low_departure : Departure or None
        Where the run in low precision leaves the noise.
    steps : int
        How many updates were compared.
    dtype : str
        The compute dtype of the port; empty if it has none.
    skipped : int
        How many steps low precision skipped; the plain run that it is compared with leaves out the same batches.
    agreement : float
        The largest difference of a gradient, of all parameters, between the plain run and the one through mxmp in
        FP32, over its norm.
    noise_ratio : float
        How far low precision is from plain, over how far the noise of one rounding is; 0 if unknown.
    courses : dict of str to Course
        The runs ``"plain"``, ``"graph"``, ``"low"``, ``"noise 1"``, ``"noise 2"`` and ``"reference"``, which leaves
        out what low precision skipped, step by step; those that were run.
    """

    right: bool | None
    verdict: str
    reasons: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    departure: Departure | None = None
    low_departure: Departure | None = None
    steps: int = 0
    dtype: str = ""
    skipped: int = 0
    agreement: float = 0.0
    noise_ratio: float = 0.0
    courses: Any = None

    @property
    def status(self) -> int:
        """Return 0 if the port is right, 1 if it is not, 2 if nothing can be said: the status of the command."""
        return {True: 0, False: 1, None: 2}[self.right]

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += section("mxmp has warned", () if self.right else self.said)
        lines += section("Likely reasons", self.reasons)
        lines += section("Files that each run has written, and that stay", self.written)
        return "\n".join(lines)


def difference(at: Departure, owners: int) -> str:
    """Return what differs at a departure, as the end of a sentence."""
    names, several = some(at.names, 3), len(at.names) > 1
    text = {
        "losses": "the loss differs",
        "outputs": "the outputs differ",
        "weights": f"{names} differ{'' if several else 's'} before it, though the gradients before agree",
        "gradients": f"the gradient{'s' * several} of {names} differ{'' if several else 's'} by {at.size:.0%}",
        "updates": "one of them makes no further update",
    }[at.what]
    if at.what == "gradients" and max(at.ratios) == 0.0:
        text = f"the gradient{'s' * several} of {names} {'are' if several else 'is'} 0"
    return text + (f" (trainer {at.owner + 1})" if owners > 1 else "")


def updates_of(number: int) -> str:
    return f"{number} update{'s' * (number != 1)}"


def behind(note: str) -> str:
    """Return a note, such as how plain MXNet was run, as a sentence behind another."""
    return f". {note[0].upper()}{note[1:]}" if note else ""
