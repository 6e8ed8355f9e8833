"""One loss-scaled step, the same for both frontends: check, apply or skip, adjust.
The algorithm ("Mixed Precision Training", ICLR 2018, section 3.2)::

    backward of loss * s
    gradients reduced over devices and workers
    if they are finite on every device:
        update with 1 / (s * batch) folded into the optimizer's rescale_grad
    else: change nothing, count, log, name the parameters
    scaler.adjust(finite); the new s applies from the next backward
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Protocol, Sequence

import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..messages.text import some
from .gradients import FiniteSums, Gradient, fetch, non_finite, zeros_and_peaks
from .ledger import Ledger, group_of
from .masters import MasterPair, take_over
from .multi_tensor import distances
from .scaler import Scaler
from .statistics import RunningStatistics

logger = logging.getLogger("mxmp")

# Skips in a row at the lowest scale after which the gradients are at fault, not the scale.
FLOOR_PATIENCE = 3
# Skips before the first applied step that are the search for a loss scale: from the default, 65536, to 32.
_FIRST_SKIPS = 11
# A float16 gradient takes a larger factor, such as the default scale of a first step, for inf, and makes NaN of zeros;
# one that is far smaller than the inverse it takes for 0.
_MOST_AT_ONCE = 2.0**15


class ScaleEvent(NamedTuple):
    """An entry of ``scale_history``: the loss scale of the steps from number ``step`` on.

    Attributes
    ----------
    step : int
        Number of the first training step at this scale. The first step of a run is 1; skipped steps count.
    loss_scale : float
        The loss scale from that step on.
    skipped : bool
        Whether this entry was made because the step before was skipped. A skipped step makes one entry, whether it
        changes the loss scale or not. False for the first entry, for a change after an applied step, and if the user
        set the scale.
    """

    step: int
    loss_scale: float
    skipped: bool


class Observer(Protocol):
    """An object that a ScaledStep notifies in each training step, while it is in the list ``ScaledStep.observers``.

    Diagnostics such as ``watch`` and ``guard`` are observers of a trainer's steps. An observer does not change whether
    the update is applied.
    """

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Read the gradients after the check for overflows, and before the update is applied or skipped.

        ``gradients`` are those on all devices, as the optimizer receives them: summed over devices and workers. They
        still contain the loss scale, unless the user called ``Trainer.unscale()``. The ``overflow_params`` of the
        ScaledStep are those of this step already, and empty if the update will be applied.
        """

    def after_step(self) -> None:
        """Read what a training step has changed, such as counters, loss scale and weights.

        Called at the end of each step, after the update was applied or skipped. Also called if the update raised an
        exception, or the skipped step a ``FloatingPointError``, before the caller of the step receives it.
        """


_NEITHER_COPIED_NOR_SAVED = ("group", "_sums", "observers", "losses")
_LOSS = ""  # no parameter has this name


class ScaledStep:
    """Decides in each training step of one trainer whether the update is applied; keeps loss scale and counters."""

    def __init__(self, scaler: Scaler, ledger: Ledger | None = None) -> None:
        self.scaler = scaler
        self.ledger = Ledger() if ledger is None else ledger
        self.steps = 0  # skipped ones included
        self.skipped_steps = 0
        self.skips_at_floor = 0  # in a row, at a loss scale that an overflow cannot lower
        self.last_step_skipped = False
        # ``"name on device"`` of each gradient with an overflow in the last step; empty after an applied step.
        self.overflow_params: tuple[str, ...] = ()
        self.history = [ScaleEvent(1, scaler.loss_scale, False)]
        self._start()

    def _start(self) -> None:
        """Set what is neither copied nor saved; join the group of all trainers with this very scaler object."""
        self.observers: list[Observer] = []
        # What the forwards since the last step returned: losses, or a Module's outputs.
        self.losses: list[NDArray] = []
        self._sums: FiniteSums | None = None
        self.group = group_of(self.scaler)
        self.group.members.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NEITHER_COPIED_NOR_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in the present gradients, or that of the next backward if there are none."""
        return self.ledger.scale if self.ledger.scaled else self.group.loss_scale

    @property
    def stale_scale(self) -> float:
        """Return the loss scale in gradients that no backward has written since a step; 0 if the next step's is right.
        A user may have written others since, by hand."""
        left = self.ledger.left
        return 0.0 if self.ledger.scaled or left in (1.0, self.loss_scale) else left

    def note_own_backward(self, adds: Sequence[NDArray]) -> None:
        """Record a Module's backward and its loss scale, which stays if it ``adds`` to gradients that are present."""
        if self.ledger.inputs_overflowed and not adds:
            self.discard([])
        if not self.ledger.scaled:
            self.continue_sums(adds)
        if not (self.ledger.scaled and adds):
            self.ledger.note_scale(self.scaler.loss_scale, awaited=False)

    def continue_sums(self, gradients: Iterable[NDArray]) -> None:
        """Before the first backward of a step: bring what the step before has left in ``gradients``, to which the
        backward adds, to the loss scale of now. Plain MXNet adds to it too, unless the user sets it to zero."""
        factor, self.ledger.left = self.loss_scale / self.ledger.left, self.loss_scale
        with autograd.pause():  # ``scale_loss`` may stand in a record, in which MXNet refuses writes into gradients
            for gradient in gradients if factor != 1.0 else ():
                for part in _in_parts(factor):
                    gradient *= part

    def note_input_overflow(self) -> None:
        """Record, and log, that the gradient of an input has an inf or NaN: the loss scale falls at the next step, or
        when the gradients are discarded."""
        if not self.ledger.inputs_overflowed:
            self.ledger.inputs_overflowed = True
            logger.warning("a gradient of an input is not finite at the loss scale %g", self.ledger.scale)

    def discard(self, gradients: Sequence[Gradient], statistics: RunningStatistics | None = None) -> None:
        """End a step without an update or a count; lower the loss scale if ``gradients``, or those of inputs, overflow.
        Waits for the device if there are gradients."""
        bad = self._check(gradients, statistics or RunningStatistics(), (), None)[0] if gradients else []
        before = self.loss_scale
        self.group.note_discard(self, not bad and not self.ledger.inputs_overflowed)
        self.ledger.inputs_overflowed = False
        after = self.scaler.loss_scale
        if bad or after != before:
            what = f"in {some([str(each) for each in bad])}" if bad else "of inputs"
            logger.warning("discarded non-finite gradients %s; loss scale %g -> %g", what, before, after)
        if after != before:
            self.history.append(ScaleEvent(self.steps + 1, after, False))

    def run(
        self,
        gradients: Sequence[Gradient],  # on all devices, summed over devices and workers
        apply: Callable[[], None],
        statistics: RunningStatistics | None = None,
        *,
        exposed: Sequence[MasterPair] = (),  # into whose float16 arrays a user may have written
        unscaled: bool = False,  # whether the gradients have been divided by the loss scale already
        again: bool = False,  # whether they are those of a skipped step, whose overflow says nothing new of the scale
    ) -> bool:
        """Check ``gradients``, apply or skip the update, adjust the loss scale; return whether the update was applied.
        Waits for the device once, again if an inf or NaN is found, and for each row-sparse gradient. Raises
        ``FloatingPointError`` after ``FLOOR_PATIENCE`` skips in a row at a loss scale that an overflow cannot lower."""
        bad, written, forward_failed = self._check(gradients, statistics or RunningStatistics(), exposed, unscaled)
        self.overflow_params = tuple(str(g) for g in bad)
        for observer in self.observers:
            observer.before_update(gradients)
        try:
            if not bad:
                for pair in written:
                    take_over(*pair)
                apply()
            self._note(gradients, bad, unscaled, forward_failed, again)
        finally:
            self.losses = []
            for observer in list(self.observers):
                observer.after_step()
        return not bad

    @property
    def at_floor(self) -> bool:
        return getattr(self.scaler, "at_floor", False)  # a user's own scaler may lack it

    def restart_floor_count(self) -> None:
        """Forget the skips in a row, of all trainers with this scaler, that would end in ``FloatingPointError``."""
        # ``guard`` calls it in a step in which it has found the layer that overflows, before it moves it to FP32.
        for member in self.group.members:
            member.skips_at_floor = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "last_step_skipped": self.last_step_skipped,
            "skips_at_floor": self.skips_at_floor,
            "overflow_params": list(self.overflow_params),
            "history": [list(event) for event in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, but keep a scaler of another class; a ``ValueError`` leaves all as it was."""
        try:
            steps, skipped, at_floor = (int(state[k]) for k in ("steps", "skipped_steps", "skips_at_floor"))
            last, names = bool(state["last_step_skipped"]), tuple(map(str, state["overflow_params"]))
            history = [ScaleEvent(int(n), float(scale), bool(skip)) for n, scale, skip in state["history"]]
            kind = state["scaler"].get("kind")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not the state of a scaled step ({type(error).__name__}: {error})") from error
        own = self.scaler.state_dict().get("kind")
        if kind == own:
            self.scaler.load_state_dict(state["scaler"])
        else:
            logger.warning("the saved loss scale is a %s's; this run's %r starts afresh", kind, self.scaler)
            history.append(ScaleEvent(steps + 1, self.scaler.loss_scale, False))
        self.steps, self.skipped_steps, self.skips_at_floor = steps, skipped, at_floor
        self.last_step_skipped, self.overflow_params, self.history = last, names, history

    def _check(
        self,
        gradients: Sequence[Gradient],
        statistics: RunningStatistics,
        exposed: Sequence[MasterPair],
        unscaled: bool | None,  # None: the gradients are discarded, and not measured
    ) -> tuple[list[Gradient], list[MasterPair], bool]:
        """Return the gradients with an overflow, the pairs of ``exposed`` into which a user has written, and whether a
        loss has overflowed too.
        Keeps or restores ``statistics``, and passes measurements of finite gradients to a scaler that measures."""
        if self._sums is None or not self._sums.serves(gradients):
            self._sums = FiniteSums(gradients)
        # All numbers come to the host in one transfer; a second one follows only if a sum is not finite.
        device_sums = self._sums()
        measures = unscaled is not None and getattr(self.scaler, "measures", False)
        measured = zeros_and_peaks(gradients) if measures else []
        sums, running, far, *found = fetch(
            device_sums, statistics.sums(after=device_sums), distances(exposed), *measured
        )
        suspects = [g for g, ok in zip(gradients, np.isfinite(sums)) if not ok]
        bad, forward_failed = self._confirmed(suspects) if suspects else ([], False)
        if bad or not np.isfinite(running).all():
            statistics.restore()
        else:
            statistics.keep()
        if found and not bad:
            zeros, peaks = found
            largest = float(peaks.max()) * (self.loss_scale if unscaled else 1.0)
            largest *= self.scaler.loss_scale / self.loss_scale  # a user may have set it since the backward
            self.scaler.note_gradients(float(zeros.mean()), largest)  # type: ignore[attr-defined]
        return bad, [pair for pair, distance in zip(exposed, far) if distance != 0], forward_failed

    def _confirmed(self, suspects: Sequence[Gradient]) -> tuple[list[Gradient], bool]:
        """Return those that have an inf or NaN, and whether a loss has one too. Waits for the device once."""
        losses = [Gradient(_LOSS, each.as_nd_ndarray()) for each in self.losses if np.dtype(each.dtype).kind == "f"]
        found = non_finite([*suspects, *losses])
        bad = [gradient for gradient in found if gradient.name != _LOSS]
        return bad, bool(bad) and len(bad) < len(found)

    def _note(
        self, gradients: Sequence[Gradient], bad: Sequence[Gradient], unscaled: bool, forward_failed: bool, again: bool
    ) -> None:
        """Update counters, history and loss scale after a step, and log; raise ``FloatingPointError`` at the floor."""
        self.steps += 1
        self.last_step_skipped = bool(bad)
        at_floor, before = self.at_floor, self.loss_scale
        if before != self.history[-1].loss_scale:  # a user set it, or the step of another trainer
            self.history.append(ScaleEvent(self.steps, before, False))
        self.ledger.left = (1.0 if unscaled else before) / self.ledger.clip
        if not again:
            self.group.note_step(self, not bad and not self.ledger.inputs_overflowed)
        self.ledger.inputs_overflowed = False
        after = self.scaler.loss_scale
        if bad:
            self.skipped_steps += 1
        if bad or after != before:
            self.history.append(ScaleEvent(self.steps + 1, after, bool(bad)))
            self._log(bad, before, after, forward_failed)
        if not again:
            self.skips_at_floor = self.skips_at_floor + 1 if bad and at_floor else 0
        if self.skips_at_floor >= FLOOR_PATIENCE:
            from .floor import FORWARD_FAILED, cure

            why = FORWARD_FAILED if forward_failed else cure(gradients, bad, before, self.scaler, unscaled)
            raise FloatingPointError(
                f"{self.skips_at_floor} steps in a row had non-finite gradients at a loss scale of {before:g}, which "
                f"{self.scaler!r} does not lower; {why}. Weights are "
                f"unchanged. Non-finite: {some(self.overflow_params)}"
            )

    def _log(self, bad: Sequence[Gradient], before: float, after: float, forward_failed: bool) -> None:
        if bad:
            is_search = self.steps == self.skipped_steps <= _FIRST_SKIPS and after < before and not forward_failed
            message = "%sstep %d skipped: non-finite gradients in %s; loss scale %g -> %g%s"
            what = "finding the loss scale: " if is_search else ""
            why = "; the loss or an output is inf or NaN already: see mxmp.diagnose.blame" if forward_failed else ""
            level = logging.INFO if is_search else logging.WARNING
            logger.log(level, message, what, self.steps, some(self.overflow_params), before, after, why)
        else:
            logger.info("loss scale %g -> %g after step %d", before, after, self.steps)


class StepView:
    """The properties that a Trainer, a Module and a BucketingModule share: their loss scale, scaler and counters.

    Each property reads the object's ScaledStep, which checks the gradients in each step and counts the steps.
    """

    if not TYPE_CHECKING:  # mypy would take it for a class with any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise ``AttributeError``, with what to write instead of other libraries' names, such as ``unscale_``."""
            if hasattr(type(self), name):  # a property that has raised an AttributeError of its own
                return object.__getattribute__(self, name)
            from ..messages.other_names import missing_method

            raise AttributeError(missing_method(self, name))

    @property
    def scaled_step(self) -> ScaledStep:
        """Return the object's ScaledStep, which has the scaler and the counters. Each subclass returns its own."""
        raise NotImplementedError

    @property
    def loss_scale(self) -> float:
        """Return the current loss scale; read-only.

        It is the scale of the next backward, or between a backward and its step the scale in the gradients. To set
        another one, assign to ``scaler.loss_scale``.
        """
        return self.scaled_step.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: Any) -> None:
        raise AttributeError(
            f"a {type(self).__name__}'s loss_scale is its scaler's: set .scaler.loss_scale = {value!r}, or create a "
            f"{type(self).__name__} with loss_scale={value!r}"
        )

    @property
    def scaler(self) -> Scaler:
        """Return the scaler, which holds the loss scale and adjusts it after each step."""
        return self.scaled_step.scaler

    @property
    def last_step_skipped(self) -> bool:
        """Return whether the last step found an inf or NaN in a gradient, and so changed no weight."""
        return self.scaled_step.last_step_skipped

    @property
    def skipped_steps(self) -> int:
        """Return how many steps have been skipped so far; a loaded state continues the count."""
        return self.scaled_step.skipped_steps

    @property
    def overflow_params(self) -> tuple[str, ...]:
        """Return ``"name on device"`` of each gradient with an inf or NaN in the last step: ``"fc1_weight on gpu(0)"``.

        Empty if the last step was not skipped.
        """
        return self.scaled_step.overflow_params

    @property
    def scale_history(self) -> list[ScaleEvent]:
        """Return a new list of ScaleEvents: for the first loss scale, each skipped step and each other change of scale.

        A skipped step makes one event, whether it lowers the loss scale or not.
        """
        return list(self.scaled_step.history)


def _in_parts(factor: float) -> list[float]:
    """Return numbers that float16 holds, whose product is ``factor``, a positive number."""
    parts = []
    while not 1 / _MOST_AT_ONCE <= factor <= _MOST_AT_ONCE:
        parts.append(_MOST_AT_ONCE if factor > 1 else 1 / _MOST_AT_ONCE)
        factor /= parts[-1]
    return [*parts, factor]
