"""How many examples a property is tried on: as many as its test names, or more by ``--hypothesis-profile=long``."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return ``count``, times what the profile in force (``tests/conftest.py``) has in place of 100 examples."""
    return max(count * settings().max_examples // 100, 1)
