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
    """A converted graph that ``fit_to_device`` rewrites for a device: what the workarounds read and change.

    Attributes
    ----------
    casted : CastGraph
        The converted graph and what is known of its nodes. Workarounds change ``casted.graph`` in place.
    grad_req : mapping of str to str
        ``"write"``, ``"add"`` or ``"null"`` by the name of a variable; a variable that is missing may have any.
    large_inputs : bool
        True leaves out the workarounds for wrong weight gradients of convolutions with small data beside their padding
        (see ``LargeInputs``): the graph runs without such data, or without gradients.
    roundings : dict of Node to list of Node
        In emulated float16, from each low-precision operator to the casts to float16 that round its outputs. The
        workaround ``emulated_float16`` fills it; in bfloat16, and on a GPU, it is empty.
    widenings : set of Node
        In emulated float16, the casts to FP32 between a float16 tensor and the low-precision operator that reads it;
        empty where ``roundings`` is.
    """

    casted: CastGraph
    grad_req: Mapping[str, str]
    large_inputs: bool
    roundings: dict[Node, list[Node]] = field(default_factory=dict)
    widenings: set[Node] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        """Return ``casted.graph``, which workarounds rewrite in place."""
        return self.casted.graph

    @property
    def low(self) -> Mapping[Node, Rule]:
        """Return the operators that compute in the compute dtype (float16 or bfloat16), each with its rule."""
        return self.casted.low

    @property
    def has_gradients(self) -> bool:
        """Return whether a backward may run: the ``grad_req`` of a variable is not "null", or is not known."""
        variables = [node for node in self.graph.nodes() if node.is_variable]
        return any(self.grad_req.get(node.name, "write") != "null" for node in variables)

    def may_be_added_to(self, entry: Entry, readers: int) -> bool:
        """Return whether MXNet may add the gradient of ``entry`` from one reader to what its array holds already.

        ``readers`` is how many inputs of nodes read ``entry``. There are two cases. First, ``entry`` is a variable
        whose ``grad_req`` is "add" or not known. Second, it has four or more readers, whose gradients MXNet may add one
        after another into one array. In all other cases the backward of each reader writes an array of its own.
        """
        requested = self.grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
        return requested == "add" or readers >= _ADDED_IN_PLACE


@dataclass(frozen=True)
class Workaround:
    """One entry of the table ``WORKAROUNDS``: a fault in a kernel, and the rewrite of a graph that avoids the fault.

    Attributes
    ----------
    name : str
        The name that ``explain`` prints, and by which ``MXMP_WITHOUT`` in the environment switches the workaround off.
    dtypes : tuple of str
        The compute dtypes of the graphs to which the workaround is applied. ``"float32"`` among them only says that
        plain FP32 MXNet has the same fault: no converted graph has it as its compute dtype.
    effect : {"fails", "wrong", "slow"}
        What happens without the workaround: an error or a crash, wrong numbers, or a loss of speed.
    fault : str
        What is wrong with the kernel, and in which case.
    source : str
        The file, function or issue where the fault is, with the version of MXNet, oneDNN or cuDNN.
    test : str
        The pytest id of a test that fails without the workaround.
    rewrite : callable
        Takes the ``FittedGraph``, rewrites its graph in place around the nodes that the fault concerns, and returns
        these nodes.
    devices : tuple of str
        The devices that have the fault: ``"cpu"``, ``"gpu"`` or both.
    """

    name: str
    dtypes: tuple[str, ...]
    effect: str
    fault: str
    source: str
    test: str
    rewrite: Callable[[FittedGraph], Sequence[Node]]
    devices: tuple[str, ...] = ("cpu",)
