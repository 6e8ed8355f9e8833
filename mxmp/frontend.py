"""One protocol for both frontends: all that ``diagnose`` needs of a network.

``gluon.training.TrainedNet`` and ``symbolic.training.TrainedModule`` implement ``TrainedNetwork``, where the state is
theirs. ``gluon.reading`` and ``symbolic.reading`` return ``ConvertedGraph`` and ``CalledGraph``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, ContextManager, Iterator, Mapping, NamedTuple, Protocol, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from .kernels.fit import UNKNOWN
from .policy import Policy
from .precision.monitoring import GraphListener
from .precision.plan import Plan
from .step.gradients import Gradient
from .step.masters import Weight
from .step.step import ScaledStep

__all__ = [
    "OTHER_WORKERS",
    "CalledGraph",
    "ConvertedGraph",
    "GraphRun",
    "Listener",
    "Listeners",
    "Note",
    "TrainedNetwork",
    "unchanged",
]

# Why ``TrainedNetwork.check_excludable`` refuses a distributed job.
OTHER_WORKERS = (
    "each worker sees batches of its own, and would move layers of its own: guard a run with one worker, and give "
    "its policy to all"
)

# Called with the monitor's name of a tensor, and the tensor.
Listener = Callable[[str, NDArray], None]
# Called with a name and an array that no operator of the network made: an input, the loss, its gradient.
Note = Callable[[str, NDArray], None]


class ConvertedGraph(NamedTuple):
    """One FP32 graph of a converted network, and the Plan that it runs by.

    ``name`` is that of its block or module. ``training`` is None where one graph serves training and inference.
    ``shapes`` are those of its inputs. ``requested_gradients`` has ``"write"``, ``"add"`` or ``"null"`` for each
    variable with a gradient. ``large_inputs``: see ``kernels.fit.fit_to_device``.
    """

    name: str
    training: bool | None
    symbol: mx.sym.Symbol
    plan: Plan
    shapes: Mapping[str, tuple]
    requested_gradients: Mapping[str, str] = UNKNOWN
    large_inputs: bool = False


class CalledGraph(NamedTuple):
    """One FP32 graph that a call of a network runs.

    ``name`` is that of its block. ``known`` has shape and dtype of its inputs and of those parameters whose shape is
    known. ``parameters`` are the names of its variables that are parameters.
    """

    name: str
    symbol: mx.sym.Symbol
    known: Mapping[str, tuple[tuple[int, ...], Any]]
    parameters: frozenset[str]


class GraphRun(NamedTuple):
    """One graph that a network runs in training.

    ``key`` is the same object as long as it is the same graph. ``symbol`` has casts. ``has_gradient`` takes a
    variable's name: gradients of others are never written where an executor runs.
    """

    key: Any
    symbol: mx.sym.Symbol
    plan: Plan
    has_gradient: Callable[[str], bool] = lambda name: True


class TrainedNetwork(Protocol):
    """A network with its trainer. A *place* is where graphs run: a block's hook, or an executor."""

    @property
    def step(self) -> ScaledStep: ...

    @property
    def policy(self) -> Policy:
        """The policy of the network as it is converted now."""

    @property
    def is_planned(self) -> bool:
        """Return whether a Plan decides, and not the rules alone."""

    @property
    def gradient_scale(self) -> float:
        """The factor by which the gradients are too large before the update."""

    def weights(self) -> list[Weight]:
        """Return the weights that are trained."""

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the parameters."""

    def unchanged(self) -> ContextManager[None]:
        """Let backwards within the block start from gradients of zero; restore gradients and running statistics."""

    def prepare(self, batch: Sequence[Any]) -> None:
        """Make the graphs that ``batch`` needs the current ones, before ``listen``."""

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run one forward and backward of ``batch`` at a loss scale, and note what no operator makes."""

    def graphs(self, place: Any) -> Iterator[GraphRun]:
        """Yield the graphs that run at a place in training."""

    def count_graphs(self, place: Any) -> int:
        """Return the number of these graphs; for every tensor, so it must be fast."""

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Let each place call ``listener_at(place)`` with every output of an operator, in training."""

    def stop_listening(self) -> None:
        """Undo ``listen``."""

    @property
    def is_stale(self) -> bool:
        """Return whether other graphs have run since ``listen``, of which no callback was notified."""

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if the policy cannot be changed from here."""

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these operators in FP32 from the next forward on. Call it between two steps."""


class Listeners(GraphListener):
    """A callback for MXNet's monitor, which takes only one and hands each array over once; calls several listeners."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        return True  # MXNet asks whether there is a callback

    @property
    def idle(self) -> bool:
        return not self._listeners

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)  # frees the handle
        for listener in list(self._listeners):
            listener(name.decode() if isinstance(name, bytes) else name, array)


@contextmanager
def unchanged(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    """Set ``gradients`` to zero within the block; restore them and ``states`` after it. Waits for the device."""
    with autograd.pause():
        before = [(array, array.copy()) for array in [*gradients, *states]]
    try:
        with autograd.pause():
            for array in gradients:
                array[:] = 0
        yield
    finally:
        mx.nd.waitall()  # a net with static memory writes statistics without telling MXNet's engine
        with autograd.pause():
            for array, copy in before:
                copy.copyto(array)
