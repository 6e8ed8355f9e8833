"""A workaround for a fault in MXNet's or oneDNN's kernels, and the graph that it is applied to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

from ..precision.casts import CastGraph
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import Rule

# MXNet adds the gradients of a tensor's readers in place if there are MXNET_EXEC_INPLACE_GRAD_SUM_CAP (8) or more. This
# is half of it.
_ADDED_IN_PLACE = 4


@dataclass
class FittedGraph:
    """A converted graph that ``fit_to_device`` rewrites for a device: what the workarounds read and change."""

    casted: CastGraph
    # "write", "add" or "null" by the name of a variable; a missing one may have any.
    grad_req: Mapping[str, str]
    # It runs without gradients, or never with data that are small beside the padding (LargeInputs).
    large_inputs: bool
    # In emulated float16: the casts that round the outputs of each low-precision operator.
    roundings: dict[Node, list[Node]] = field(default_factory=dict)
    # In emulated float16: the casts to FP32 that low-precision operators read.
    widenings: set[Node] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.casted.graph

    @property
    def low(self) -> Mapping[Node, Rule]:
        return self.casted.low

    @property
    def has_gradients(self) -> bool:
        """Return whether a backward may run: a requested gradient that is not known counts."""
        variables = [node for node in self.graph.nodes() if node.is_variable]
        return any(self.grad_req.get(node.name, "write") != "null" for node in variables)

    def may_be_added_to(self, entry: Entry, readers: int) -> bool:
        """Return whether MXNet may add one reader's gradient of ``entry`` to what its array holds already."""
        requested = self.grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
        return requested == "add" or readers >= _ADDED_IN_PLACE


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
    rewrite: Callable[[FittedGraph], Sequence[Node]]
    # Those that have the fault.
    devices: tuple[str, ...] = ("cpu",)
