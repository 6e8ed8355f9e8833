"""``load``: any report that was saved."""

from __future__ import annotations

from .advising.advise import Advice
from .profiling.profile import Profile
from .shared.saved import read_report

__all__ = ["load"]

_FORMS = {report.FORMAT: report.from_dict for report in (Advice, Profile)}


def load(path: str) -> Advice | Profile:
    """Read what ``save`` of a report wrote; which it is stands in the file.

    Raises
    ------
    ValueError
        The file holds no report.
    """
    return read_report(path, _FORMS)
