"""``guard``: moves a layer to FP32 that has overflowed in several training steps."""

from __future__ import annotations

import logging
import math
from typing import Collection, Iterable, NamedTuple, Sequence

from mxnet.ndarray import NDArray

from ..observed import Observed, ObservedGraph
from ..policy import Policy
from ..precision.graph import Entry, Node
from ..precision.rule import Kind, Role
from ..precision.rules import rule_under
from ..step.floor import lower_scale_fits
from ..step.gradients import Gradient
from ..step.scaler import check_count, check_scale
from .blaming.recording import Recording
from .blaming.report import Blame, Range
from .blaming.verdict import Record, verdict
from .networks.frontends import Network, Trainer, trained_network
from .networks.probe import StepObserver
from .networks.protocol import TrainedNetwork
from .text import some

logger = logging.getLogger("mxmp")


class Moved(NamedTuple):
    """A layer that ``guard`` has moved to FP32.

    It consists of the operators that overflowed, and of those of the same type that share a parameter with one of them.

    Attributes
    ----------
    step : int
        The number of the step after which the layer was moved, counted by its Trainer or module from 1.
    operators : tuple of str
        The names of the layer's operators in the FP32 graph, as ``Policy(exclude=)`` takes them. Where a Plan decides
        the dtypes, also the operators that compute in low precision only because they read these operators' outputs.
    overflows : int
        In how many steps an overflow of the layer was counted; at least ``patience`` of ``guard``.
    blame : Blame
        Which tensor overflowed in the last of these steps, and why.
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
    """A running guard of a net or module, made by ``guard``. It ends with ``close``, or with its ``with`` block.

    It moves a layer to FP32, where it stays, after its overflows in ``patience`` steps (argument of ``guard``).

    Attributes
    ----------
    moved : list of Moved
        The layers that were moved, oldest first.
    overflows : dict of str to int
        From the name of an operator in the FP32 graph to the number of steps in which an overflow of its layer was
        counted. ``guard`` says which overflows count. An operator without one is missing.
    """

    def __init__(self, network: TrainedNetwork, patience: int, low_scale: float) -> None:
        network.check_excludable()
        self.moved: list[Moved] = []
        self.overflows: dict[str, int] = {}
        self._patience = patience
        self._low_scale = low_scale
        self._to_move: Moved | None = None
        self._harmful: set[str] = set()  # operators at fault for a skipped step
        self._scale = network.step.loss_scale
        self._policy = network.policy
        super().__init__(network)

    @property
    def policy(self) -> Policy:
        """Return the policy of the network, which excludes the operators that were moved.

        It can be read after ``close`` too, and after ``mxmp.restore`` has turned the net back to FP32.
        Use the policy for the next run: ``mxmp.convert(net, str(guard.policy))``. If a Plan converted the network, save
        the new plan instead, as in the example of ``guard``: the policy lacks the Plan's decisions.
        """
        return self._policy

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing was moved to FP32"

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Count the overflow of the layer at fault, and wait for the device, if the probe has recorded the step."""
        if not self._recording.has_operators:
            return
        self._recording.note_gradients(gradients)
        records, graphs, skips = self._recording.records(), self._probe.graphs, bool(self._step.overflow_params)
        records = _without_harmless(records, graphs) if skips else records
        params = [weight.name for weight in self._network.weights(frozen=True)]
        first = next((record for record in records if not record.range.finite), None)
        if first is None:
            return
        is_gradient = first.observed is not None and first.observed.backward
        too_high = self._step.loss_scale > self._low_scale or self._has_large_gradients(records)
        if is_gradient and too_high and not self._step.at_floor:
            return
        planned = self._network.is_planned
        layers = (_layer_at_fault(graph, first, records, params, with_followers=planned) for graph in graphs)
        layer = next(filter(None, layers), None)
        if layer is None:
            return
        # A counted overflow is about to be cured, so skipped steps at the lowest scale are counted anew.
        self._step.restart_floor_count()
        found = verdict(records, graphs, params, self._step.loss_scale)
        for name in layer:
            self.overflows[name] = self.overflows.get(name, 0) + 1
        self._harmful.update(layer if skips else ())
        overflows = max(self.overflows[name] for name in layer)
        if overflows >= self._patience and not self._harmful.isdisjoint(layer):
            self._to_move = Moved(self._step.steps + 1, tuple(layer), overflows, found)

    def _has_large_gradients(self, records: Sequence[Record]) -> bool:
        """Return whether the parameters' gradients are large everywhere: see ``lower_scale_fits``."""
        factor = self._step.loss_scale / self._network.gradient_scale
        found = [
            r for _, r in records if r.name.startswith("the gradient of ") and r.name != "the gradient of the loss"
        ]
        peaks = [0.0 if math.isnan(each.largest) else each.largest * factor for each in found]
        return lower_scale_fits(peaks, [i for i, each in enumerate(found) if each.finite])

    def after_step(self) -> None:
        """Move the layer that ``before_update`` has chosen, if any, and start the probe if the next step matters."""
        ran, to_move, self._to_move = self._recording.has_operators, self._to_move, None
        # Stale: the hook or executor at which it listens was replaced.
        if ran or (self._probe.listens and self._network.is_stale):
            self._stop()
        if to_move is not None:
            self._network.exclude(to_move.operators)
            self._policy = self._network.policy
            self.moved.append(to_move)
            logger.warning("%s", to_move)
        before, self._scale = self._scale, self._step.loss_scale
        raised = before < self._scale <= self._low_scale
        if (self._step.last_step_skipped or raised) and not self._probe.listens:
            self._start()

    def _start(self) -> None:
        super()._start()
        self._recording.note_weights(self._network.weights(frozen=True))

    def _forget(self) -> None:
        self._recording = Recording()

    def _observe(self, observed: Observed, array: NDArray) -> None:
        self._recording.note(observed.label, array, observed)


def guard(target: Network, trainer: Trainer | None = None, *, patience: int = 3, low_scale: float = 128.0) -> Guard:
    """Move each layer to FP32 that has overflowed in ``patience`` training steps, and log a warning about it.

    ::

        with mxmp.diagnose.guard(net, trainer) as guarded:      # or guard(module)
            train()
        print(guarded)                                          # what was moved, when and why
        mxmp.explain(net).graphs[0].plan.save("plan.json")      # for the next run: mxmp.convert(net, plan)

    The guard looks into the first step after this call, each step after a skipped one, and each step after the loss
    scale was raised to ``low_scale`` or less. It records the range of each operator's tensors while the step trains, as
    ``watch`` does; other steps cost nothing. Only the first tensor with an inf or NaN in a recorded step matters: the
    operator that made the tensor is "at fault". If a cast from FP32 made the tensor, the operators that read it in low
    precision are at fault; if that tensor is a gradient, the operator whose backward reads it.

    The overflow of an activation does not depend on the loss scale, and is always counted. That of a gradient is
    counted only where the loss scale is at most ``low_scale``, or where the scaler cannot lower it; and not where the
    scaler can lower it and the gradients of all parameters are large, as in a regression on targets in the hundreds:
    there the lower scale is the cure. An inf or NaN that appears in FP32 is counted where an operator in low precision
    has rounded what was read to 0 or to 1, as a product in front of a logarithm, or until a difference of it is 0, as
    an offset of 3000 that is taken off again: that operator is at fault. In a skipped step, an output without
    consequences, such as the inf that a sigmoid turns into 1, is ignored, and the next tensor with an inf or NaN
    matters.

    When an operator's overflows were counted in ``patience`` steps, at least one of them skipped, it is added to the
    policy's ``exclude``, with the operators of its type that share a parameter with it. The next forward runs the new
    graph. Weights, master weights, momenta, running statistics and the loss scale stay as they are. Three skipped steps
    in a row at the lowest loss scale raise ``FloatingPointError``; a counted overflow sets the number of these steps
    back to 0, for all trainers that have the same scaler.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer.
    trainer : Trainer, optional
        For a net, and only for a net: the Trainer that updates its parameters.
    patience : int
        In how many steps, in a row or not, overflows of an operator must be counted before it is moved; 1 or more.
    low_scale : float
        The loss scale, 2**-126 to 2**127, up to which an overflow of a gradient is counted. At a higher scale, to lower
        it is the remedy; below ``low_scale``, gradients of other layers would begin to underflow.

    Returns
    -------
    Guard
        Says what was moved. Its ``close``, or the end of its ``with`` block, ends the guard.

    Raises
    ------
    TypeError
        ``target`` is none of these, a net's ``trainer`` is no mxmp.Trainer, or a module has a ``trainer``.
    ValueError
        The net is not converted, is a part of a net that was converted as a whole, or shares a block with one; a block
        of it has an op hook (``register_op_hook``); its parameters are stored in float16, and another net reads one of
        them or another trainer updates one; the module has no optimizer; ``patience`` or ``low_scale`` is
        out of range; or other workers take part in the training, who would each move layers of their own.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=128.0)
    >>> with mxmp.guard(net, trainer) as guarded:  # train in this block
    ...     with autograd.record():
    ...         loss = net(mx.nd.random.uniform(shape=(8, 4))).mean()
    ...     trainer.backward(loss)
    ...     trainer.step(8)
    >>> guarded.moved  # the layers that overflowed again and again
    []
    """
    patience, low_scale = check_count("patience", patience), check_scale("low_scale", low_scale)
    return Guard(trained_network(target, trainer), patience, low_scale)


# -- The layer at fault --------------------------------------------------------------------------------


def _without_harmless(records: Sequence[Record], graphs: Sequence[ObservedGraph]) -> list[Record]:
    """Return the ``records`` of a skipped step without operators' outputs that are not finite and did no harm."""
    bad = [observed for observed, found in records if observed is not None and not found.finite]
    harmed = {observed.operator for observed in bad if not observed.backward}
    harmed.update([observed.operator for observed in bad if observed.backward][:1])

    def is_harmless(record: Record) -> bool:
        observed, found = record
        if found.finite or observed is None or observed.backward:
            return False
        graph = next(graph for graph in graphs if observed.node in graph)
        readers = {graph.original_name(node) for node in graph.readers(observed.node)}
        # All readers returned finite values, as a sigmoid of inf does, and sent back no gradient that began it.
        return not graph.is_output(observed.node) and harmed.isdisjoint(readers)

    return [record for record in records if not is_harmless(record)]


def _layer_at_fault(
    graph: ObservedGraph, first: Record, records: Sequence[Record], params: Collection[str], *, with_followers: bool
) -> list[str]:
    """Return the FP32 names of the operators to move because of ``first``; none if FP32 or another graph made it."""
    made = _operators_at_fault(graph, first)
    fault = [node for node in made if graph.is_low(node)] or _rounded_to_a_limit(graph, made, records)
    layer = dict.fromkeys(found for node in fault for found in _sharing_parameters(graph, node, params))
    # A Plan keeps them in low precision; under a policy, the rules put them into FP32 as well.
    if with_followers:
        layer.update(dict.fromkeys(_followers(graph, layer)))
    return list(dict.fromkeys(graph.original_name(node) for node in graph.operators if node in layer))


def _operators_at_fault(graph: ObservedGraph, first: Record) -> list[Node]:
    """Return the operators, in any precision, that made ``first``, or read it where a cast or parameter overflowed."""
    observed, found = first
    if observed is None:  # a parameter that is stored in low precision, whose master is finite
        return graph.readers_of(found.name) if found.dtype != "float32" else []
    if observed.node not in graph:  # of another graph, or a sum of gradients: MXNet does not say of which tensor
        return []
    made = [node for node in graph.operators if graph.original_name(node) == observed.operator]
    if any(map(graph.is_low, made)) or not observed.inserted:
        return made
    return [graph.source(Entry(observed.node)).node] if observed.backward else graph.readers(observed.node)


# Where log, rsqrt, a division, arccos or the gradient of a root has no finite result.
_LIMITS = (-1.0, 0.0, 1.0)


def _rounded_to_a_limit(graph: ObservedGraph, made: Sequence[Node], records: Sequence[Record]) -> list[Node]:
    """Return the operators in low precision whose rounding made a 0 or 1 that FP32 operators ``made`` cannot take."""
    rounded: dict[str, Range] = {}
    exact: dict[str, Range] = {}
    for observed, found in records:
        if observed is None or not observed.backward:
            ranges = exact if observed is not None and not observed.inserted and found.dtype == "float32" else rounded
            ranges[found.name] = found

    def reaches(node: Node) -> bool:
        name = graph.original_name(node)
        found = rounded.get(name, exact.get(name))
        return found is not None and bool(found.lowest in _LIMITS or found.highest in _LIMITS or found.zeros)

    def had_reached(node: Node) -> bool:
        """Return whether a result had the limit before it was rounded, where that is known: then FP32 has it too."""
        before, after = (ranges.get(graph.original_name(node)) for ranges in (exact, rounded))
        if before is None or after is None or before.zeros < after.zeros:
            return False
        return all(getattr(before, end) in _LIMITS for end in ("lowest", "highest") if getattr(after, end) in _LIMITS)

    def is_difference(node: Node) -> bool:
        """Return whether ``node`` may be 0 because rounding has made what it adds up equal."""
        rule = rule_under(graph.plan.policy, graph.original_op(node))
        return rule.role in (Role.SUM, Role.MATRIX) or bool(rule.offsets)

    left, seen = list(made), set(made)
    fault: list[Node] = []
    while left:
        reader = left.pop()
        read = [node for entry in reader.inputs if not (node := graph.source(entry).node).is_variable]
        reaching = [node for node in read if reaches(node)]
        if not reaching and reader not in made and is_difference(reader):
            fault += [reader] if graph.is_low(reader) else filter(graph.is_low, read)
        for node in dict.fromkeys(reaching):
            if node in seen:
                continue
            seen.add(node)
            if had_reached(node):
                left.append(node)
            elif graph.is_low(node) or graph.is_low(reader):  # what rounds its result, or reads it rounded
                fault.append(node if graph.is_low(node) else reader)
            else:
                left.append(node)
    return fault


def _sharing_parameters(graph: ObservedGraph, node: Node, params: Collection[str]) -> Iterable[Node]:
    """Yield ``node``, and the operators of its type in low precision that read one of its parameters."""
    # All time steps of an unrolled cell, for example, read one weight.
    own = _parameters_read(graph, node, params)
    yield node
    for other in graph.operators:
        alike = graph.original_op(other) == graph.original_op(node) and graph.is_low(other)
        if alike and not own.isdisjoint(_parameters_read(graph, other, params)):
            yield other


def _parameters_read(graph: ObservedGraph, node: Node, params: Collection[str]) -> set[str]:
    """Return the parameters that ``node`` reads, also through casts."""
    return {name for entry in node.inputs if (name := graph.source(entry).node.name) in params}


def _followers(graph: ObservedGraph, layer: Iterable[Node]) -> Iterable[Node]:
    """Yield the operators that are in low precision only because they read ``layer``, also through others."""
    stack, found = list(layer), set(layer)
    while stack:
        for reader in graph.readers(stack.pop()):
            follows = rule_under(graph.plan.policy, graph.original_op(reader)).kind is Kind.FOLLOW
            if reader not in found and follows and graph.is_low(reader):
                found.add(reader)
                stack.append(reader)
                yield reader
