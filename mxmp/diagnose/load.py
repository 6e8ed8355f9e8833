"""``load``: any report that was saved."""

from __future__ import annotations

from .advising.advice import Advice
from .profiling.report import Profile
from .shared.report import read_report

__all__ = ["load"]


def load(path: str) -> Advice | Profile:
    """Read what ``save`` of a report wrote; which it is stands in the file.

    Raises
    ------
    ValueError
        The file holds no report.
    """
    return read_report(path, Advice, Profile)
