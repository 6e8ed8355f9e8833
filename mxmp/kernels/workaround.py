"""A workaround for a fault in MXNet's or oneDNN's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

from ..precision.casts import LowGraph
from ..precision.graph import Node


@dataclass(frozen=True)
class Workaround:
    """One entry of the table ``WORKAROUNDS``: a fault in a kernel, and the rewrite of a graph that avoids it."""

    # What explain prints, and MXMP_WITHOUT takes.
    name: str
    # Compute dtypes; "float32" only says that plain FP32 MXNet has the same fault.
    dtypes: tuple[str, ...]
    # "fails", "wrong" or "slow".
    effect: str
    fault: str
    # File, function or issue, with the version of MXNet, oneDNN or cuDNN.
    source: str
    # The pytest id of a test that fails without the workaround.
    test: str
    # Rewrites the graph in place, and returns the nodes that the fault concerns.
    rewrite: Callable[[LowGraph], Sequence[Node]]
    # Those that have the fault.
    devices: tuple[str, ...] = ("cpu",)
