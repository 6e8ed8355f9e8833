"""``tune`` with few rounds, and in this process."""

from __future__ import annotations

from mxmp.tuning import search

FEW = {"_ROUNDS": 3, "_MOST_ROUNDS": 3, "_PROFILES": 2, "_MOST_PROFILES": 2}


def measured_here(job, show):
    """Stands for ``measured_apart`` where a test changes functions of the search."""
    seconds = dict(job.seconds)

    def tell(what, value):
        if what == "seconds":
            seconds.update(value)
        if what == "part":
            show(value)

    return search.measured(job, tell), seconds
