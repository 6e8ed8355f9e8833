"""``guard``: a layer that overflows again and again is moved to FP32 by itself."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, NamedTuple, Sequence

from mxnet.ndarray import NDArray

from ...policy import Policy
from ...step.gradients import Gradient
from ...step.scaler import check_count, check_scale
from ..blaming.recording import Recording
from ..blaming.report import Blame
from ..blaming.verdict import verdict
from ..shared.targets import Network, Trainer, trained
from ..watching.taps import Tap
from ..watching.wiring import Seen
from .layers import layer_at_fault

__all__ = ["Guard", "Moved", "guard"]

logger = logging.getLogger("mxmp")


class Moved(NamedTuple):
    """A layer that went to FP32 after step ``step``, the last of those that ``blame`` explains.

    ``operators``: the names that it has in the graph, by which ``Policy(exclude=)`` knows it.
    """

    step: int
    operators: tuple[str, ...]
    overflows: int
    blame: Blame

    def __str__(self) -> str:
        others = f" and {len(self.operators) - 1} more" if len(self.operators) > 1 else ""
        return (
            f"step {self.step}: {self.operators[0]}{others} moved to FP32 after {self.overflows} overflows. "
            f"The last one: {self.blame}"
        )


class Guard:
    """From ``guard``; ``close`` it, or use it as a context manager. What was moved stays in FP32.

    Attributes
    ----------
    moved : list of Moved
    overflows : dict of str to int
        Of each operator that was blamed, how often.
    """

    def __init__(self, target: Any, trainer: Trainer | None, patience: int, low_scale: float) -> None:
        self.moved: list[Moved] = []
        self.overflows: dict[str, int] = {}
        self._patience = patience
        self._low_scale = low_scale
        self._recording = Recording()
        self._due: Moved | None = None
        self._tap = Tap(trained(target, trainer), self._see)
        self._tap.network.check_excludable()
        self._step = self._tap.network.step
        self._scale = self._step.loss_scale
        self._arm()
        self._step.observers.append(self)

    @property
    def policy(self) -> Policy:
        """Today's, which excludes what was moved; for the next run: ``mxmp.convert(net, str(guard.policy))``."""
        return self._tap.network.policy

    def close(self) -> None:
        """Stop looking; what was moved stays in FP32."""
        if self in self._step.observers:
            self._step.observers.remove(self)
        if self._tap.armed:
            self._tap.disarm()
        self._recording = Recording()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing was moved to FP32"

    # -- as an observer of steps --------------------------------------------------------------------

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        if not self._recording.of_operators:
            return
        self._recording.note_gradients(gradients)
        met, wirings = self._recording.met(), self._tap.wirings
        params = [weight.name for weight in self._tap.network.weights()]
        first = next((each for each in met if not each.range.finite), None)
        if first is None or not self._counts(first.seen):
            return
        planned = self._tap.network.is_planned
        layers = (layer_at_fault(wiring, first, params, with_followers=planned) for wiring in wirings)
        layer = next(filter(None, layers), None)
        if layer is None:
            return
        self._step.forgive()
        found = verdict(met, wirings, params, self._step.loss_scale)
        for name in layer:
            self.overflows[name] = self.overflows.get(name, 0) + 1
        overflows = max(self.overflows[name] for name in layer)
        if overflows >= self._patience:
            self._due = Moved(self._step.steps + 1, tuple(layer), overflows, found)

    def after_step(self) -> None:
        ran, due, self._due = self._recording.of_operators, self._due, None
        if self._tap.armed and (ran or self._tap.network.is_stale):
            self._tap.disarm()
            self._recording = Recording()
        if due is not None:
            self._tap.network.exclude(due.operators)
            self.moved.append(due)
            logger.warning("%s", due)
        before, self._scale = self._scale, self._step.loss_scale
        raised = before < self._scale <= self._low_scale
        if (self._step.last_step_skipped or raised) and not self._tap.armed:
            self._arm()

    def _counts(self, seen: Seen | None) -> bool:
        """A lower scale helps no activation; a gradient counts where the scale is low, or cannot be lowered."""
        return (
            seen is None or not seen.backward or self._step.loss_scale <= self._low_scale or self._step.scaler.at_floor
        )

    # -- taking tensors -----------------------------------------------------------------------------

    def _arm(self) -> None:
        self._recording = Recording()
        self._recording.note_weights(self._tap.network.weights())
        self._tap.arm()

    def _see(self, seen: Seen, array: NDArray) -> None:
        self._recording.note(seen.label, array, seen)


def guard(
    target: Network,
    trainer: Trainer | None = None,
    *,
    patience: int = 3,
    low_scale: float = 128.0,
) -> Guard:
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

    Steps that are not looked at cost nothing. What FP32 makes infinite or NaN moves nothing.

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
    return Guard(target, trainer, check_count("patience", patience), check_scale("low_scale", low_scale))
