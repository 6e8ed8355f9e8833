"""Inserts operators into a graph, with names after the operator of the network for which they are there."""

from __future__ import annotations

from typing import Callable

from ..precision.casts import inserted
from ..precision.graph import Entry, Node


def beside(node: Node) -> Callable[..., Entry]:
    """Return ``op(kind, role, *inputs, **attrs)``, which makes an operator and returns its first output."""

    def op(kind: str, role: str, *inputs: Entry, **attrs: object) -> Entry:
        return inserted(kind, f"{node.name}_{role}", inputs, **attrs)

    return op
