"""A workaround for a fault in MXNet's or oneDNN's kernels, and the graph that it is applied to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

from ..precision.casts import CastGraph
from ..precision.graph import Graph, Node
from ..precision.rules import Rule

__all__ = ["Fitting", "Workaround"]


@dataclass
class Fitting:
    """A graph with casts that is being fitted to the kernels of a device.

    Attributes
    ----------
    casted : CastGraph
    grad_req : mapping of str to str
        The requested gradients of variables, by name; those of other variables are unknown.
    large_inputs : bool
        Whether the graph will run only at shapes for which ``LargeInputs`` holds.
    roundings : dict of Node to list of Node
        In emulated float16: the casts that round the outputs of each low node.
    widenings : set of Node
        In emulated float16: the casts that widen an input of a low node.
    """

    casted: CastGraph
    grad_req: Mapping[str, str]
    large_inputs: bool
    roundings: dict[Node, list[Node]] = field(default_factory=dict)
    widenings: set[Node] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.casted.graph

    @property
    def low(self) -> Mapping[Node, Rule]:
        """The operators that compute in the low dtype, each with its rule."""
        return self.casted.low


@dataclass(frozen=True)
class Workaround:
    """One row of the table.

    Attributes
    ----------
    name : str
        By which ``explain`` shows it and ``MXMP_WITHOUT`` switches it off.
    dtypes : tuple of str
        The compute dtypes of the graphs in which it is applied. ``"float32"`` beside them says that plain FP32
        MXNet has the same fault.
    effect : {"fails", "wrong", "slow"}
        What happens without it: an error or a crash, wrong numbers, or a loss of speed.
    fault : str
        What is wrong, and in which case.
    source : str
        The file, function or issue where the fault is, with the version.
    test : str
        A test that fails without the workaround.
    where : callable
        Returns the nodes of a graph that need it.
    rewrite : callable
        Changes the graph around these nodes, in place.
    """

    name: str
    dtypes: tuple[str, ...]
    effect: str
    fault: str
    source: str
    test: str
    where: Callable[[Fitting], Sequence[Node]]
    rewrite: Callable[[Fitting, Sequence[Node]], None]
    device: str = "cpu"
