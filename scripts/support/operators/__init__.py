"""Designed calls of every operator that may compute low: ``case.CASES``, and the errors of what they give."""

from . import arithmetic, layout  # noqa: F401  (the designs fill CASES)
