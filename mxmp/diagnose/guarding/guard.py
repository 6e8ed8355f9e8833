"""``guard``: a layer that overflows again and again is moved to FP32 by itself."""

from __future__ import annotations

import logging
from typing import Collection, Iterable, NamedTuple, Sequence

from mxnet.ndarray import NDArray

from ...frontend import TrainedNetwork
from ...observed import Observed, ObservedGraph
from ...policy import Policy
from ...precision.graph import Entry, Node
from ...precision.plan import rule_under
from ...precision.rules import Kind
from ...probe import StepObserver
from ...step.gradients import Gradient
from ...step.scaler import check_count, check_scale
from ..blaming.recording import Recording
from ..blaming.report import Blame
from ..blaming.verdict import Record, verdict
from ..shared.report import some
from ..shared.targets import Network, Trainer, trained

__all__ = ["Guard", "Moved", "guard"]

logger = logging.getLogger("mxmp")


class Moved(NamedTuple):
    """A layer that went to FP32 after step ``step``, the last of those that ``blame`` explains.

    ``operators``: its names in the graph, by which ``Policy(exclude=)`` knows it.
    """

    step: int
    operators: tuple[str, ...]
    overflows: int
    blame: Blame

    def __str__(self) -> str:
        return (
            f"step {self.step}: {some(self.operators, 1)} moved to FP32 after {self.overflows} overflows. "
            f"The last one: {self.blame}"
        )


class Guard(StepObserver):
    """From ``guard``; ``close`` it, or use it as a context manager. What was moved stays in FP32.

    Attributes
    ----------
    moved : list of Moved
    overflows : dict of str to int
        How often each operator was blamed.
    """

    def __init__(self, network: TrainedNetwork, patience: int, low_scale: float) -> None:
        network.check_excludable()
        self.moved: list[Moved] = []
        self.overflows: dict[str, int] = {}
        self._patience = patience
        self._low_scale = low_scale
        self._due: Moved | None = None
        self._scale = network.step.loss_scale
        super().__init__(network)

    @property
    def policy(self) -> Policy:
        """Return the policy, which excludes what was moved; next time: ``mxmp.convert(net, str(guard.policy))``."""
        return self._network.policy

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing was moved to FP32"

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Count the overflow of a step that was looked at, and note the layer that is due to be moved."""
        if not self._recording.has_operators:
            return
        self._recording.note_gradients(gradients)
        records, graphs = self._recording.records(), self._probe.graphs
        params = [weight.name for weight in self._network.weights()]
        first = next((record for record in records if not record.range.finite), None)
        if first is None or not self._counts(first.observed):
            return
        planned = self._network.is_planned
        layers = (_layer_at_fault(graph, first, params, with_followers=planned) for graph in graphs)
        layer = next(filter(None, layers), None)
        if layer is None:
            return
        self._step.restart_floor_count()
        found = verdict(records, graphs, params, self._step.loss_scale)
        for name in layer:
            self.overflows[name] = self.overflows.get(name, 0) + 1
        overflows = max(self.overflows[name] for name in layer)
        if overflows >= self._patience:
            self._due = Moved(self._step.steps + 1, tuple(layer), overflows, found)

    def after_step(self) -> None:
        """Move the layer that is due, and look at the next step if this one was skipped or the scale was raised."""
        ran, due, self._due = self._recording.has_operators, self._due, None
        if ran or (self._probe.listens and self._network.is_stale):
            self._stop()
        if due is not None:
            self._network.exclude(due.operators)
            self.moved.append(due)
            logger.warning("%s", due)
        before, self._scale = self._scale, self._step.loss_scale
        raised = before < self._scale <= self._low_scale
        if (self._step.last_step_skipped or raised) and not self._probe.listens:
            self._start()

    def _counts(self, observed: Observed | None) -> bool:
        """Return whether the scale is not to blame: no scale helps an activation, a gradient only a lower one."""
        gradient = observed is not None and observed.backward
        return not gradient or self._step.loss_scale <= self._low_scale or self._step.scaler.at_floor

    def _start(self) -> None:
        self._forget()
        self._recording.note_weights(self._network.weights())
        self._probe.start()

    def _forget(self) -> None:
        self._recording = Recording()

    def _observe(self, observed: Observed, array: NDArray) -> None:
        self._recording.note_observed(observed, array)


def guard(target: Network, trainer: Trainer | None = None, *, patience: int = 3, low_scale: float = 128.0) -> Guard:
    """Move a layer to FP32 that overflows again and again, and say so.

    ::

        with mxmp.diagnose.guard(net, trainer) as guarded:      # or guard(module)
            train()
        print(guarded)                                          # what was moved, when and why
        mxmp.explain(net).graphs[0].plan.save("plan.json")      # for the next run: mxmp.convert(net, plan)

    After a skipped step, and where the scale was raised at or under ``low_scale``, the next step is looked at operator
    by operator as ``watch`` does, in the step that trains. If it overflows, the first operator whose tensor was not
    finite is to blame. An activation counts at any loss scale, since no scale helps it; a gradient counts at
    ``low_scale`` and below, and where the scaler cannot go lower. At the ``patience``-th time the operator is added
    to the policy's ``exclude``, with those that share its parameters; the next forward runs the new graph. Weights,
    masters, momenta, statistics and the scale go on as they are, and the skip itself has changed nothing. While a
    layer is being counted, the error after repeated overflow at the lowest scale waits.

    Steps that are not looked at cost nothing. Values that are infinite or NaN in FP32 too move nothing.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer.
    trainer : Trainer
        For a net: the one that steps.
    patience : int
        Overflows of one operator after which it is moved.
    low_scale : float
        A loss scale at which gradients of the rest begin to underflow.

    Raises
    ------
    TypeError, ValueError
        As ``watch``; or other workers take part, who would each move layers of their own; or ``target`` is a part of
        what was converted.
    """
    patience, low_scale = check_count("patience", patience), check_scale("low_scale", low_scale)
    return Guard(trained(target, trainer), patience, low_scale)


# -- The layer at fault --------------------------------------------------------------------------------


def _layer_at_fault(graph: ObservedGraph, first: Record, params: Collection[str], *, with_followers: bool) -> list[str]:
    """Return names of operators in low precision, in graph order, for the first tensor that was not finite.

    The operator that made the tensor; where that is FP32, or no operator, those that read it rounded; with each,
    those of its kind that share a parameter with it, such as the other steps of an unrolled cell. None where FP32
    went wrong.

    ``with_followers``: add the operators after them that follow their inputs by the rules, where a Plan decides.
    """
    fault = [node for node in _at_fault(graph, first) if graph.is_low(node)]
    layer = dict.fromkeys(found for node in fault for found in _sharing(graph, node, params))
    if with_followers:
        layer.update(dict.fromkeys(_followers(graph, layer)))
    return list(dict.fromkeys(graph.name(node) for node in graph.operators if node in layer))


def _at_fault(graph: ObservedGraph, first: Record) -> list[Node]:
    observed, found = first
    if observed is None:  # a parameter that is stored in low precision, whose master is finite
        return graph.readers_of(found.name) if found.dtype != "float32" else []
    if observed.node not in graph:  # another graph's; or a sum of gradients, and MXNet does not say whose
        return []
    made = [node for node in graph.operators if graph.name(node) == observed.operator]
    if any(map(graph.is_low, made)) or not observed.inserted:
        return made
    return [graph.source(Entry(observed.node)).node] if observed.backward else graph.readers(observed.node)


def _sharing(graph: ObservedGraph, node: Node, params: Collection[str]) -> Iterable[Node]:
    own = _parameters(graph, node, params)
    yield node
    for other in graph.operators:
        alike = graph.kind(other) == graph.kind(node) and graph.is_low(other)
        if alike and not own.isdisjoint(_parameters(graph, other, params)):
            yield other


def _parameters(graph: ObservedGraph, node: Node, params: Collection[str]) -> set[str]:
    return {name for entry in node.inputs if (name := graph.source(entry).node.name) in params}


def _followers(graph: ObservedGraph, layer: Iterable[Node]) -> Iterable[Node]:
    stack, found = list(layer), set(layer)
    while stack:
        for reader in graph.readers(stack.pop()):
            follows = rule_under(graph.plan.policy, graph.kind(reader)).kind is Kind.FOLLOW
            if reader not in found and follows and graph.is_low(reader):
                found.add(reader)
                stack.append(reader)
                yield reader
