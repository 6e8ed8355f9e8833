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
    "in_training",
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
    """One FP32 graph, and the Plan by which it is converted.

    Made for ``explain``, which converts the FP32 graph again to report on it.

    Attributes
    ----------
    name : str
        Name of the block (``"resnet0"``), or of the Symbol, followed by the bucket's key where a module has buckets.
    training : bool or None
        Whether the graph runs in training or in inference; None for a Symbol, which is not bound.
    symbol : Symbol
        The FP32 graph, without casts.
    plan : Plan
        The dtype that each operator computes in.
    shapes : mapping of str to tuple
        From the name of an input (``"data"``) to its shape; the shapes of parameters are inferred from these.
    requested_gradients : mapping of str to str
        From a variable's name to ``"write"``, ``"add"`` or ``"null"``. A variable that is missing is not known.
    large_inputs : bool
        Whether the graph runs only at inputs that are large beside the padding of its convolutions; the workarounds for
        kernels that are wrong at small inputs are then left out.
    """

    name: str
    training: bool | None
    symbol: mx.sym.Symbol
    plan: Plan
    shapes: Mapping[str, tuple]
    requested_gradients: Mapping[str, str] = UNKNOWN
    large_inputs: bool = False


class CalledGraph(NamedTuple):
    """One FP32 graph that a call of a Gluon net runs, or a Symbol, for ``advise``; neither need be converted.

    Attributes
    ----------
    name : str
        Name of the block that the graph was traced from, or of the Symbol.
    symbol : Symbol
        The FP32 graph.
    known : mapping of str to (tuple of int, dtype)
        From the name of a variable to its shape and dtype; a variable whose shape is not known is missing.
    parameters : frozenset of str
        Names of those variables of ``symbol`` that are a block's parameters; empty for a Symbol.
    """

    name: str
    symbol: mx.sym.Symbol
    known: Mapping[str, tuple[tuple[int, ...], Any]]
    parameters: frozenset[str]


class GraphRun(NamedTuple):
    """One graph that a network runs in training, as it runs: with casts.

    Attributes
    ----------
    key : object
        Stands for the graph: two GraphRuns describe the same graph if their keys are the same object.
    symbol : Symbol
        The graph that runs, with casts.
    plan : Plan
        The plan that ``symbol`` was converted by.
    has_gradient : callable
        From a variable's name to whether backward computes its gradient. MXNet's monitor also reports an array for the
        gradient of every other variable of an executor; backward never writes into that array.
    """

    key: Any
    symbol: mx.sym.Symbol
    plan: Plan
    has_gradient: Callable[[str], bool] = lambda name: True


class TrainedNetwork(Protocol):
    """A network with what trains it: all that ``watch``, ``blame`` and ``guard`` need, the same for both frontends.

    ``mxmp.gluon`` implements it for a converted net with its Trainer, ``mxmp.symbolic`` for a Module. One object is
    made for each call of a diagnostic. Several methods take a *place*: an object at which graphs run, which is the hook
    of a converted block (Gluon) or an executor (Module). ``listen`` passes every place to its callback.
    """

    @property
    def step(self) -> ScaledStep:
        """The scaled step of the Trainer or Module: its loss scale, counters and observers."""

    @property
    def policy(self) -> Policy:
        """The Policy of the network as it is converted now; ``exclude`` replaces it."""

    @property
    def is_planned(self) -> bool:
        """Return whether the network was converted by a Plan. Otherwise the rules of its Policy decide."""

    @property
    def gradient_scale(self) -> float:
        """The factor in the gradients: the loss scale, or 1 once ``Trainer.unscale()`` has divided it out."""

    def weights(self) -> list[Weight]:
        """Return the parameters that are trained, each with its arrays and FP32 masters on all devices.

        Parameters without a gradient (``grad_req="null"``) are left out.
        """

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each trained parameter on each device, as the last backward left it."""

    def unchanged(self) -> ContextManager[None]:
        """Set all gradients to zero on entry; restore gradients and running statistics when the block ends.

        For a replayed step, which must not change what the user trains, and must not add to earlier gradients. Waits
        for the device when the block ends.
        """

    def prepare(self, batch: Sequence[Any]) -> None:
        """Select the graphs that ``batch`` runs, before ``listen``: a BucketingModule switches to the batch's bucket.

        ``batch`` holds the arguments of the Gluon net, or one ``DataBatch`` for a module.
        """

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run forward and backward of ``batch`` once, in training mode and at ``loss_scale``, without an update.

        Calls ``note(name, array)`` for the arrays that no operator of the network makes, so that the monitor does not
        report them: the inputs and, in Gluon, the loss and its gradient. ``batch`` is as in ``prepare``. ``loss`` maps
        the output of a Gluon net to its loss; a module has its loss in its graph, and ignores ``loss``.
        """

    def graphs(self, place: Any) -> Iterator[GraphRun]:
        """Yield the graphs that run in training at ``place``, the hook of a block or an executor.

        A graph that has not run yet is missing, since a hook makes it at the first call.
        """

    def count_graphs(self, place: Any) -> int:
        """Return how many graphs ``graphs(place)`` would yield, without reading them.

        A probe asks when it does not know the name of a reported tensor, to learn whether the place has a new graph.
        """

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Report every output of every operator in training, from the next forward until ``stop_listening``.

        Calls ``listener_at(place)`` once for each place, a block's hook or an executor. What it returns is then called
        with the monitor's name of each tensor (``"fc1_output"``) and the tensor, for all graphs at that place.

        Raises
        ------
        ValueError
            A block has an op hook of the user's (``register_op_hook``); MXNet calls only one.
        """

    def stop_listening(self) -> None:
        """Remove all listeners that ``listen`` installed. Without any, does nothing."""

    @property
    def is_stale(self) -> bool:
        """Return whether a place that ``listen`` listens to was replaced since, so that new graphs run unreported.

        A net that is converted again, or an executor that is bound again, for a batch of another size, is such a case.
        The caller stops listening and starts again.
        """

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if ``exclude`` cannot be used on this network.

        Where several workers train, each would exclude other operators. A part of a net that was converted as a whole
        has no policy of its own.
        """

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators with these names (``"fc1_fwd"``) in FP32, too, from the next forward on.

        Converts the network again. Parameters keep their values; gradients are lost, so call it between an update and
        the next forward.
        """


def in_training(listener: Listener, is_training: Callable[[], bool]) -> Listener:
    """Return a listener that calls ``listener`` where ``is_training()`` is True, and does nothing in inference."""

    def called(name: str, array: NDArray) -> None:
        """Pass a tensor on if this is training."""
        if is_training():
            listener(name, array)

    return called


class Listeners(GraphListener):
    """A callback for MXNet's monitor that calls any number of listeners with each tensor.

    A block or an executor has room for one callback, and the handle of an array may be read only once, so that
    listeners could not be installed one by one. One object is installed for one block or executor.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        return True  # MXNet asks whether there is a callback

    @property
    def idle(self) -> bool:
        """Return whether no listener is left, so that the callback can be removed from the block or executor."""
        return not self._listeners

    def add(self, listener: Listener) -> None:
        """Call ``listener(name, array)`` for each tensor from now on."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling ``listener``, which ``add`` was called with."""
        self._listeners.remove(listener)

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        """Call all listeners with one tensor; MXNet calls this.

        ``name`` is bytes or str. The last further argument is the handle of the array; Gluon passes the operator's name
        before it, an executor does not.
        """
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)  # frees the handle
        for listener in list(self._listeners):
            listener(name.decode() if isinstance(name, bytes) else name, array)


@contextmanager
def unchanged(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    """Set the arrays ``gradients`` to zero on entry; restore them and the arrays ``states`` when the block ends.

    Restores after an error too. Waits for the device when the block ends.
    """
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
