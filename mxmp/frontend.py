"""One protocol for both frontends: all that ``diagnose`` needs of a network.

``gluon.training.TrainedNet`` and ``symbolic.training.TrainedModule`` implement ``TrainedNetwork``, where the state is
theirs. ``gluon.reading`` and ``symbolic.reading`` return ``ConvertedGraph`` and ``CalledGraph``.
"""

from __future__ import annotations

from contextlib import contextmanager
from os import PathLike
from typing import Any, Callable, Collection, ContextManager, Iterator, Mapping, NamedTuple, Protocol, Sequence

import mxnet as mx
import numpy as np
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

# Why ``TrainedNetwork.check_excludable`` refuses a distributed job.
OTHER_WORKERS = (
    "each worker sees batches of its own, and would move layers of its own: guard a run with one worker, and give "
    "its policy to all"
)

# Called with the monitor's name of a tensor, and the tensor.
Listener = Callable[[str, NDArray], None]
# Called with a name and an array that no operator of the network made: an input, the loss, its gradient.
Note = Callable[[str, NDArray], None]


def instead(got: Any, wants_symbol: bool = False) -> str:
    """Return the end of a message about ``got``, which is no network of the right kind: what to write instead.

    ``wants_symbol`` says whether a Symbol was expected, and not a net. Returns ``""`` where nothing is known.
    """
    if isinstance(got, type):
        return f": that is a class, make an object of it, {got.__name__}(...)"
    if isinstance(got, mx.sym.Symbol):
        return ": for a Symbol use mxmp.cast_symbol, or mxmp.Module to train it"
    if isinstance(got, mx.gluon.Block):
        return ": for a Block use mxmp.convert and mxmp.Trainer"
    if isinstance(got, mx.mod.BaseModule):
        return ": a Module is converted when it is made, mxmp.Module(symbol, policy='float16'); its graph is .symbol"
    if isinstance(got, mx.gluon.Trainer):
        return ": that is a trainer, pass the network that it trains"
    if isinstance(got, mx.gluon.ParameterDict):
        return ": those are parameters, pass the net itself"
    if isinstance(got, (str, PathLike)):
        load = "mx.sym.load(file)" if wants_symbol else "gluon.SymbolBlock.imports(symbol_file, ['data'], params_file)"
        return f": load it from its files first, {load}"
    if isinstance(got, (list, tuple, set, dict)):
        return ": call it for each network"
    if isinstance(got, (NDArray, np.ndarray)):
        return ": that is an array, the network comes first"
    return ""


class ConvertedGraph(NamedTuple):
    """One FP32 graph of a network, and the Plan by which it is converted, for ``explain``.

    Attributes
    ----------
    name : str
        Name of the block (``"resnet0"``), or of the Symbol; of a BucketingModule with the key of the bucket:
        ``"softmax, bucket 10"``.
    training : bool or None
        True if the graph runs in training, False in inference; None for a Symbol that is not bound.
    symbol, plan
        The FP32 graph and its plan.
    shapes : mapping of str to tuple
        From the name of an input (``"data"``) to its shape; the shapes of parameters are inferred from these.
    requested_gradients : mapping of str to str
        From the name of a variable to its ``grad_req``; a variable is missing if its ``grad_req`` is not known.
    large_inputs : bool
        True if mxmp runs the graph only with inputs that are large beside the padding: it then lacks the workarounds
        for oneDNN's wrong weight gradients at small inputs. False if the graph may get inputs of any size.
    """

    name: str
    training: bool | None
    symbol: mx.sym.Symbol
    plan: Plan
    shapes: Mapping[str, tuple]
    requested_gradients: Mapping[str, str] = UNKNOWN
    large_inputs: bool = False


class CalledGraph(NamedTuple):
    """One FP32 graph whose matrix operators ``advise`` counts: a Symbol, or a graph that a call of a Gluon net runs.

    The net may be converted or not.

    Attributes
    ----------
    name : str
        Name of the block that the graph was traced from, or of the Symbol.
    symbol : Symbol
        The FP32 graph.
    known : mapping of str to (tuple of int, dtype)
        From the name of a variable (an input or a parameter) to its shape and dtype; a variable whose shape is not
        known is missing.
    parameters : frozenset of str
        Names of those variables of ``symbol`` that are a block's parameters; empty for a Symbol.
    """

    name: str
    symbol: mx.sym.Symbol
    known: Mapping[str, tuple[tuple[int, ...], Any]]
    parameters: frozenset[str]


class GraphRun(NamedTuple):
    """One converted graph that a network runs in training, for a diagnostic that listens to its operators.

    Attributes
    ----------
    key : object
        Identifies the graph: two GraphRuns describe the same graph if their keys are the same object (``is``).
    symbol : Symbol
        The graph that runs, with casts and workarounds.
    plan : Plan
        The plan by which ``symbol`` was converted.
    has_gradient : callable
        Takes the name of a variable and returns whether backward computes its gradient. The monitor of an executor
        reports a gradient array for every variable; arrays into which backward never writes must be ignored.
    """

    key: Any
    symbol: mx.sym.Symbol
    plan: Plan
    has_gradient: Callable[[str], bool] = lambda name: True


class ReplayedGraph(NamedTuple):
    """One FP32 graph that a network runs for a batch, with its plan and FP32 copies of its parameters, for ``audit``.

    Two objects are equal only if they are of the same graph of the same network: ``number`` tells them apart.

    Attributes
    ----------
    number : int
        Position of the graph among those of the network, in the order of their first calls.
    symbol, plan
        The FP32 graph, without casts, and the plan by which the network computes it.
    values : mapping of str to NDArray
        FP32 copies of parameters and running statistics, master weights where there are some, by the variables' names.
    trained : frozenset of str
        Names of the parameters that have a gradient.
    constants : frozenset of str
        Names of the variables that no training changes, such as Gluon Constants.
    training : bool
        Whether the batch runs in training mode.
    """

    number: int
    symbol: mx.sym.Symbol
    plan: Plan
    values: Mapping[str, NDArray]
    trained: frozenset[str]
    constants: frozenset[str]
    training: bool


# Runs a graph in place of the network on its inputs by name; returns all outputs.
GraphRunner = Callable[[ReplayedGraph, Mapping[str, NDArray]], "list[NDArray]"]


class ReplayedNetwork(Protocol):
    """The protocol by which ``audit`` runs a batch through other graphs than the network's, in both frontends.

    The graphs are computed on copies: weights, gradients, running statistics and random state stay as they are.
    """

    @property
    def training(self) -> bool:
        """Return whether ``replay`` records the batch in training mode, so that there are gradients."""

    def replay(self, run: GraphRunner) -> tuple[list[NDArray], list[NDArray]]:
        """Run the batch once, with ``run(graph, inputs)`` in place of each graph; return the outputs and the losses.

        In training mode autograd records it. The list of losses is empty if the network has none but its outputs.
        """

    def unchanged(self) -> ContextManager[None]:
        """Return a context manager that restores what ``replay`` may change outside the graphs."""

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if ``exclude`` cannot be used on this network."""

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators named ``nodes`` in FP32 from the next forward on, as ``TrainedNetwork.exclude`` does."""


class TrainedNetwork(Protocol):
    """The protocol by which ``watch``, ``blame`` and ``guard`` use a network that trains, of either frontend.

    Each call of a diagnostic makes one such object. Several methods take a *place*, the object that runs graphs: in
    Gluon the hook of a converted block, in a Module an executor. ``listen`` passes every place to its callback.
    """

    @property
    def step(self) -> ScaledStep:
        """Return the ScaledStep of the Trainer or Module, which applies or skips the update of each training step.

        It has the loss scale, the counts of steps, and the observers (such as ``Watch``), which it calls in every step.
        """

    @property
    def policy(self) -> Policy:
        """Return the Policy of the conversion, or that of its Plan (``plan.policy``); ``exclude`` replaces it."""

    @property
    def is_planned(self) -> bool:
        """Return whether the user gave a Plan for the conversion; if not, rules choose the dtypes under a Policy."""

    @property
    def gradient_scale(self) -> float:
        """Return the factor by which the gradients of the parameters are multiplied now.

        It is the loss scale, or 1 if ``Trainer.unscale()`` has divided this step's gradients by the loss scale.
        """

    def weights(self, *, frozen: bool = False) -> list[Weight]:
        """Return the parameters that are trained, each with its arrays and FP32 master weights on all devices.

        With ``frozen=True``, those with ``grad_req="null"`` follow; constants and running statistics are left out.
        """

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each trained parameter on each device, still multiplied by ``gradient_scale``."""

    def unchanged(self) -> ContextManager[None]:
        """Return a context manager within which ``replay`` may run a batch without changing the user's training.

        On entry it sets all gradients to zero, so that a backward with ``grad_req="add"`` does not add to those of the
        last step. When the block ends, it restores gradients and running statistics, and waits for the device. Call
        ``prepare`` first.
        """

    def prepare(self, batch: Sequence[Any], loss: Callable | None) -> None:
        """Switch a BucketingModule to the bucket of ``batch``, where it stays; in Gluon, make missing arrays.

        To make them, calls the net if it has no graphs, and then net and loss if a parameter of any mxmp.Trainer waits
        for its shape. Call it before ``listen``, which listens to the current bucket alone, and before ``unchanged``,
        which restores only arrays that exist when its block begins. The arguments are the first two of ``replay``.
        """

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run forward and backward of ``batch`` once, in training mode, without an update.

        ``batch`` holds the arguments of the Gluon net, or one ``DataBatch`` for a module. ``loss`` takes the output of
        a net and returns the loss; only a module, which ignores it, may get None. ``loss_scale`` multiplies the loss.
        Arrays that no operator of the network makes, so that MXNet's monitor does not report them, are passed to
        ``note(name, array)``: a net's inputs, loss and gradient of the loss; a module's data and labels.
        """

    def graphs(self, place: Any) -> Iterator[GraphRun]:
        """Yield a ``GraphRun`` for each graph that a place (a Gluon hook, or an executor) has for training.

        A hook builds a graph at the first call that needs it, so there may be more later; an executor has one.
        """

    def count_graphs(self, place: Any) -> int:
        """Return how many graphs ``graphs(place)`` would yield, without reading them."""

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Report every tensor that an operator computes in training, forward and backward, until ``stop_listening``.

        Calls ``listener_at(place)`` at once for each place, of a BucketingModule for those of the current bucket. From
        the next forward on, the function that ``listener_at`` returned is called, for every tensor of that place, with
        the name that MXNet's monitor gives the tensor (``"fc1_output"``), and the tensor.

        Raises
        ------
        ValueError
            The user has called ``register_op_hook`` on a block, and MXNet calls only one such callback for a block.
        """

    def stop_listening(self) -> None:
        """Remove all listeners that ``listen`` installed; do nothing if there are none."""

    @property
    def is_stale(self) -> bool:
        """Return whether a hook or executor with a listener was replaced, so that its tensors are reported no more.

        A net gets new hooks when it is converted again; a module gets new executors when it is bound again or gets a
        batch of another size. The caller then calls ``stop_listening`` and ``listen``.
        """

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if ``exclude`` cannot be used on this network.

        It cannot where several workers train, because each would exclude other operators. A Gluon net is refused
        in two more cases. First, ``convert`` was called with another net, which contains this one or shares blocks with
        it, and converted blocks outside this net too. Second, a parameter that may be stored in float16 is also in
        another converted net, or is updated by another trainer.
        """

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators named ``nodes`` (``"fc1_fwd"``) in FP32 too, from the next forward on.

        Operators excluded before stay so. Converts the network again: parameters keep their values, but gradients may
        be lost, so call it between an update and the next forward.
        """


def in_training(listener: Listener, is_training: Callable[[], bool]) -> Listener:
    """Return a function of a tensor's name and array that calls ``listener`` with them, if ``is_training()`` is True.

    It calls ``is_training`` for each tensor anew, and ignores the tensor if the result is False.
    """

    def called(name: str, array: NDArray) -> None:
        if is_training():
            listener(name, array)

    return called


class Listeners(GraphListener):
    """A callback for MXNet's monitor that passes each tensor on to any number of listeners.

    MXNet calls one callback for a block or executor, with a raw array handle that must be freed exactly once. So each
    block or executor gets one object of this class, which makes one NDArray of the handle for all listeners.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        return True  # MXNet asks whether there is a callback

    def __reduce__(self) -> tuple:
        """Return how ``copy`` and ``pickle`` make a copy: as None, so that a copy of a watched block is not watched."""
        return type(None), ()

    @property
    def idle(self) -> bool:
        """Return whether no listener is left, so that the callback can be removed from the block or executor."""
        return not self._listeners

    def add(self, listener: Listener) -> None:
        """Call ``listener(name, array)`` from now on for each tensor that MXNet's monitor reports, in inference too."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling ``listener``, which must have been added by ``add``."""
        self._listeners.remove(listener)

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        """Call all listeners with the name and the array of one tensor. MXNet calls this method.

        The last argument is the handle of the array; a block, not an executor, passes the operator's name before it.
        """
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)  # frees the handle
        for listener in list(self._listeners):
            listener(name.decode() if isinstance(name, bytes) else name, array)


@contextmanager
def unchanged(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    """Set the arrays ``gradients`` to zero; when the ``with`` block ends, restore them and ``states``.

    ``states`` are running statistics, which the block may change. Waits for the device before and after the block: the
    backward of a Module's executor writes running statistics without notifying MXNet's engine.
    """
    mx.nd.waitall()
    with autograd.pause():
        before = [(array, array.copy()) for array in [*gradients, *states]]
    try:
        with autograd.pause():
            for array in gradients:
                array[:] = 0
        yield
    finally:
        mx.nd.waitall()
        with autograd.pause():
            for array, copy in before:
                copy.copyto(array)
