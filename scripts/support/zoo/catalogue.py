"""Every model by name, those of each kind spread so that one of each comes first."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any

from . import language, layers, vision

CASES: dict[str, Any] = {**vision.cases(), **language.cases(), **layers.cases()}


def in_order() -> list[str]:
    """Return the names, the smallest of each family first, then the next of each."""
    families: dict[str, list[str]] = {}
    for name in CASES:
        families.setdefault(re.split(r"[\d_]+", name.replace("cifar_", "cifar"))[0], []).append(name)
    for family in families.values():
        family.sort(key=lambda name: float((re.findall(r"\d+", name) or [0])[0]))  # depth, width or size
    return [name for row in zip_longest(*families.values()) for name in row if name]
