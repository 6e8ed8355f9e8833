"""One protocol for both frontends: all that ``diagnose`` needs of a network.

``of_gluon.training`` and ``of_symbolic.training`` implement ``TrainedNetwork``; ``reading`` of each returns
``ConvertedGraph`` and ``CalledGraph``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Iterator,
    Mapping,
    NamedTuple,
    Protocol,
    Sequence,
)

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...policy import Policy
from ...precision.casts import UNKNOWN
from ...precision.monitoring import Listener
from ...precision.plan import Plan
from ...step.gradients import Gradient
from ...step.masters import Weight
from ...step.step import ScaledStep

# Why ``TrainedNetwork.check_excludable`` refuses a distributed job.
OTHER_WORKERS = (
    "each worker sees batches of its own, and would move layers of its own: guard a run with one worker, and give "
    "its policy to all"
)

# Called with a name and an array that no operator of the network made: an input, the loss, its gradient.
Note = Callable[[str, NDArray], None]


class ConvertedGraph(NamedTuple):
    """One FP32 graph of a network, and the Plan by which it is converted, for ``explain``."""

    # Of the block (``"resnet0"``) or the Symbol; of a BucketingModule with the bucket: ``"softmax, bucket 10"``.
    name: str
    # None for a Symbol that is not bound.
    training: bool | None
    symbol: mx.sym.Symbol
    plan: Plan
    # Those of the inputs, by name; the shapes of parameters are inferred from these.
    shapes: Mapping[str, tuple]
    # From the name of a variable to its ``grad_req``, where that is known.
    requested_gradients: Mapping[str, str] = UNKNOWN
    # The graph lacks the workarounds for oneDNN's wrong weight gradients, as it runs only with inputs that are large
    # beside the padding.
    large_inputs: bool = False


class CalledGraph(NamedTuple):
    """One FP32 graph whose matrix operators ``advise`` counts: a Symbol, or one that a call of a Gluon net runs."""

    name: str
    symbol: mx.sym.Symbol
    # Shape and dtype of each variable whose shape is known.
    known: Mapping[str, tuple[tuple[int, ...], Any]]
    # Names of the variables that are a block's parameters; empty for a Symbol.
    parameters: frozenset[str]


class GraphRun(NamedTuple):
    """One converted graph that a network runs in training, for a diagnostic that listens to its operators."""

    # Two GraphRuns describe the same graph if their keys are the same object.
    key: Any
    symbol: mx.sym.Symbol
    plan: Plan
    # Whether backward computes the gradient of a variable: an executor's monitor reports a gradient array for each, and
    # must be ignored for the others.
    has_gradient: Callable[[str], bool] = lambda name: True


class ReplayedGraph(NamedTuple):
    """One FP32 graph that a network runs for a batch, with its plan and FP32 parameters, for ``audit``."""

    # Position among the network's graphs in the order of their first calls; it tells equal graphs apart.
    number: int
    symbol: mx.sym.Symbol
    plan: Plan
    # FP32 copies of parameters (master weights where there are some) and running statistics.
    values: Mapping[str, NDArray]
    trained: frozenset[str]
    # Variables that no training changes, such as Gluon Constants.
    constants: frozenset[str]
    training: bool
    # Returns the plan with more operators in FP32, given by their names in a plan.
    excluding: Callable[[Collection[str]], Plan]
    # The name of the net, if it is another one, which the loss calls.
    other: str = ""
    # Whether the inputs are the batch, and no features that Python code or another graph has computed.
    reads_data: bool = True


# Runs a graph in place of the network on its inputs by name; returns all outputs.
GraphRunner = Callable[[ReplayedGraph, Mapping[str, NDArray]], "list[NDArray]"]


class ReplayedNetwork(Protocol):
    """The protocol by which ``audit`` runs a batch through other graphs than the network's, in both frontends.
    The graphs get copies: weights, gradients, running statistics and random state stay as they are."""

    @property
    def training(self) -> bool:
        """Return whether ``replay`` records the batch in training mode, so that there are gradients."""

    def replay(self, run: GraphRunner) -> tuple[list[NDArray], list[NDArray]]:
        """Run the batch once, with ``run(graph, inputs)`` in place of each graph; return the outputs and the losses.
        In training mode autograd records it. There are no losses if the network has none but its outputs."""

    def unchanged(self) -> ContextManager[None]:
        """Return a context manager that restores what ``replay`` may change outside the graphs."""

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if ``exclude`` cannot be used on this network."""

    def exclude(self, operators: Collection[tuple[int, str]]) -> None:
        """Keep operators in FP32 from the next forward on, each given by the number of its graph and its name there."""


class TrainedNetwork(Protocol):
    """The protocol by which ``watch``, ``blame`` and ``guard`` use a network that trains, of either frontend.
    A *place* is an object that runs graphs: in Gluon the hook of a converted block, in a Module an executor."""

    @property
    def step(self) -> ScaledStep:
        """Return the ScaledStep: the loss scale, the counts of steps, and the observers that each step calls."""

    @property
    def policy(self) -> Policy:
        """Return the Policy of the conversion, or of its Plan; ``exclude`` replaces it."""

    @property
    def is_planned(self) -> bool:
        """Return whether the user gave a Plan; if not, rules choose the dtypes under a Policy."""

    @property
    def gradient_scale(self) -> float:
        """Return the factor in the gradients now: the loss scale, or 1 after ``Trainer.unscale()``."""

    def weights(self, *, frozen: bool = False) -> list[Weight]:
        """Return the trained parameters; with ``frozen``, then those with ``grad_req="null"``.
        Constants and running statistics are left out."""

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each trained parameter on each device, multiplied by ``gradient_scale``."""

    def unchanged(self) -> ContextManager[None]:
        """Return a context manager within which ``replay`` does not change the user's training; call ``prepare`` first.
        It sets all gradients to zero, then restores them and running statistics, and waits for the device."""

    def prepare(self, batch: Sequence[Any], loss: Callable | None) -> None:
        """Make the arrays that ``replay`` needs; switch a BucketingModule to the bucket of ``batch``, where it stays.
        Call it before ``listen``, which listens to the current bucket, and before ``unchanged``, which restores arrays
        that exist. In Gluon this may call net and loss."""

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run forward and backward of ``batch`` in training mode, of the loss times ``loss_scale``; make no update.
        ``batch``: the net's arguments, or one ``DataBatch``; a module ignores ``loss``, which takes the net's output.
        What MXNet's monitor does not report is passed to ``note``: inputs, labels, the loss and its gradient."""

    def graphs(self, place: Any) -> Iterator[GraphRun]:
        """Yield a ``GraphRun`` for each training graph of a place; a hook may build more later."""

    def count_graphs(self, place: Any) -> int:
        """Return how many graphs ``graphs(place)`` would yield, without reading them."""

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Report every tensor that an operator computes in training, forward and backward, until ``stop_listening``.
        From the next forward on, the listeners ``listener_at(place)`` get the monitor's name (``"fc1_output"``) and the
        tensor. Raises ``ValueError`` if a block has a user's ``register_op_hook``."""

    def stop_listening(self) -> None:
        """Remove all listeners that ``listen`` installed; do nothing if there are none."""

    @property
    def is_stale(self) -> bool:
        """Return whether a place with a listener was replaced, as by ``convert``, ``bind`` or a batch of another size.
        The caller then calls ``stop_listening`` and ``listen``."""

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if ``exclude`` cannot be used: several workers would each exclude other operators.
        Also for a net that is a part of a converted one, and for a parameter that may be float16 and is shared with
        another converted net or trainer."""

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators named ``nodes`` (``"fc1_fwd"``) in FP32 too, from the next forward on.
        Gradients may be lost, so call it between an update and the next forward."""


def in_training(listener: Listener, is_training: Callable[[], bool]) -> Listener:
    """Return a listener that calls ``listener`` for each tensor for which ``is_training()`` is then True."""

    def called(name: str, array: NDArray) -> None:
        if is_training():
            listener(name, array)

    return called


@contextmanager
def restored(arrays: Sequence[NDArray], wanted: Callable[[NDArray], bool] = lambda array: True) -> Iterator[None]:
    """Give those of ``arrays`` that are ``wanted`` at the end of the block the values from before it."""
    with autograd.pause():
        before = [(array, array.copy()) for array in arrays]
    try:
        yield
    finally:
        with autograd.pause():
            for array, copy in before:
                if wanted(array):
                    copy.copyto(array)


@contextmanager
def unchanged(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    """Set ``gradients`` to zero; when the block ends, restore them and ``states``; wait for the device at both."""
    # The backward of a Module's executor writes running statistics without notifying MXNet's engine.
    mx.nd.waitall()
    with restored([*gradients, *states]):
        with autograd.pause():
            for array in gradients:
                array[:] = 0
        try:
            yield
        finally:
            mx.nd.waitall()
