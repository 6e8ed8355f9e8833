"""One loss-scaled step, the same for both frontends: check, apply or skip, adjust.

The algorithm ("Mixed Precision Training", ICLR 2018, section 3.2)::

    backward of loss * s
    gradients reduced over devices and workers
    if they are finite on every device:
        update with 1 / (s * batch) folded into the optimizer's rescale_grad
    else:
        change nothing, count, log, name the parameters
    scaler.adjust(finite); the new s applies from the next backward
"""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import numpy as np

from .gradients import FiniteSums, Gradient, fetch, non_finite, zeros_and_peaks
from .masters import MasterPair, distances, take_over
from .scaler import Scaler, group_of
from .statistics import RunningStatistics

__all__ = ["FLOOR_PATIENCE", "Observer", "ScaleEvent", "ScaledStep", "StepView"]

logger = logging.getLogger("mxmp")

# Skips in a row at the lowest scale after which the gradients are at fault, not the scale.
FLOOR_PATIENCE = 3


class ScaleEvent(NamedTuple):
    """From step number ``step`` on (counted from 1, skipped ones included) the scale is ``loss_scale``."""

    step: int
    loss_scale: float
    skipped: bool


class Observer(Protocol):
    """Is notified of each step, and changes nothing of the step itself."""

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Look at the gradients, checked and still scaled, before they are applied or dropped."""

    def after_step(self) -> None:
        """Look at the state after the step, which was applied or skipped."""


class ScaledStep:
    """The state that a Trainer or Module adds to its optimizer's; decides whether a step is applied."""

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler
        self.group = group_of(scaler)  # all steps that have the same scaler object
        self.group.join(self)
        # The scale of the gradients that a backward left and no step has applied; None where there are none.
        self.scaled_by: float | None = None
        self.steps = 0  # skipped ones included
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.overflow_params: tuple[str, ...] = ()  # "name on device" of each non-finite gradient of the last step
        self.history = [ScaleEvent(1, scaler.loss_scale, False)]  # and one event for every change of scale and skip
        self.observers: list[Observer] = []  # neither copied nor saved
        self._skips_at_floor = 0
        self._sums: FiniteSums | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, whose scalers and gradients are others."""
        return {name: value for name, value in vars(self).items() if name not in ("group", "_sums", "observers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, group=group_of(state["scaler"]), scaled_by=None, _sums=None, observers=[])
        self.group.join(self)

    @property
    def loss_scale(self) -> float:
        """Return the scale of the next backward, and of existing gradients; frozen from backward to step."""
        return self.group.loss_scale if self.scaled_by is None else self.scaled_by

    def note_own_backward(self, adds: bool) -> None:
        """Note a backward that serves this step alone. ``adds``: it adds to existing gradients, so at their scale."""
        if self.scaled_by is None or not adds:
            self.scaled_by = self.scaler.loss_scale

    def run(
        self,
        gradients: Sequence[Gradient],
        apply: Callable[[], None],
        statistics: RunningStatistics | None = None,
        *,
        exposed: Sequence[MasterPair] = (),
        unscaled: bool = False,
    ) -> bool:
        """Check ``gradients``, then ``apply()`` or skip; adjust the scale. Synchronizes once.

        Returns whether the step was applied.

        Parameters
        ----------
        exposed : sequence of MasterPair
            Those into whose float16 arrays a user may have written; the update starts from what was written.
        unscaled : bool
            Whether the gradients have been divided by the scale already.

        Raises
        ------
        FloatingPointError
            After ``FLOOR_PATIENCE`` skips in a row at the lowest scale; names the parameters.
        """
        bad, written = self._check(gradients, statistics or RunningStatistics(), exposed, unscaled)
        for observer in self.observers:
            observer.before_update(gradients)
        try:
            if not bad:
                for pair in written:
                    take_over(*pair)
                apply()
            self._note(bad)
        finally:
            for observer in list(self.observers):
                observer.after_step()
        return not bad

    def forgive(self) -> None:
        """Count overflows in a row at the lowest scale anew, because something is being done about them."""
        self._skips_at_floor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that ``load_state_dict`` continues from bit for bit."""
        return {
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "last_step_skipped": self.last_step_skipped,
            "skips_at_floor": self._skips_at_floor,
            "overflow_params": list(self.overflow_params),
            "history": [list(event) for event in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; on a ``ValueError`` nothing has changed.

        The state of another kind of scaler sets the counters and leaves the scaler as it is.
        """
        try:
            steps, skipped, at_floor = (int(state[k]) for k in ("steps", "skipped_steps", "skips_at_floor"))
            last, names = bool(state["last_step_skipped"]), tuple(map(str, state["overflow_params"]))
            history = [ScaleEvent(int(n), float(scale), bool(skip)) for n, scale, skip in state["history"]]
            kind = state["scaler"]["kind"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of a scaled step ({type(error).__name__}: {error})") from error
        own = self.scaler.state_dict().get("kind")
        if kind == own:
            self.scaler.load_state_dict(state["scaler"])
        else:
            logger.warning("the saved loss scale is a %s's; this run's %r starts afresh", kind, self.scaler)
            history.append(ScaleEvent(steps + 1, self.scaler.loss_scale, False))
        self.steps, self.skipped_steps, self._skips_at_floor = steps, skipped, at_floor
        self.last_step_skipped, self.overflow_params, self.history = last, names, history

    def _check(
        self,
        gradients: Sequence[Gradient],
        statistics: RunningStatistics,
        exposed: Sequence[MasterPair],
        unscaled: bool,
    ) -> tuple[list[Gradient], list[MasterPair]]:
        """Return the non-finite gradients, and those of ``exposed`` that a user has written into.

        There is one transfer, and a second only where the first says overflow. It also brings what a scaler that
        measures adjusts by.
        """
        if self._sums is None or not self._sums.serves(gradients):
            self._sums = FiniteSums(gradients)
        device_sums = self._sums()
        measured = zeros_and_peaks(gradients) if getattr(self.scaler, "measures", False) else []
        sums, running, far, *found = fetch(
            device_sums, statistics.sums(after=device_sums), distances(exposed), *measured
        )
        suspects = [g for g, ok in zip(gradients, np.isfinite(sums)) if not ok]
        bad = non_finite(suspects) if suspects else []
        if bad or not np.isfinite(running).all():
            statistics.restore()
        else:
            statistics.keep()
        if found and not bad:
            zeros, peaks = found
            largest = float(peaks.max()) * (self.loss_scale if unscaled else 1.0)
            largest *= self.scaler.loss_scale / self.loss_scale  # which a user may have set since the backward
            self.scaler.note_gradients(float(zeros.mean()), largest)  # type: ignore[attr-defined]
        return bad, [pair for pair, distance in zip(exposed, far) if distance != 0]

    def _note(self, bad: Sequence[Gradient]) -> None:
        self.steps += 1
        self.last_step_skipped = bool(bad)
        self.overflow_params = tuple(str(g) for g in bad)
        at_floor, before = self.scaler.at_floor, self.loss_scale
        if before != self.history[-1].loss_scale:  # a user set it, or the step of another trainer
            self.history.append(ScaleEvent(self.steps, before, False))
        self.group.note_step(self, not bad)
        after = self.scaler.loss_scale
        if bad:
            self.skipped_steps += 1
        if bad or after != before:
            self.history.append(ScaleEvent(self.steps + 1, after, bool(bad)))
            self._log(bad, before, after)
        self._skips_at_floor = self._skips_at_floor + 1 if bad and at_floor else 0
        if self._skips_at_floor >= FLOOR_PATIENCE:
            cause = "lower it, or look at" if before > 1 else "so scaling is not the cause: look at"
            raise FloatingPointError(
                f"{self._skips_at_floor} steps in a row had non-finite gradients at a loss scale of {before:g}, which "
                f"{self.scaler!r} does not lower; {cause} the learning rate, the data and the loss. Weights are "
                f"unchanged. Non-finite: {_some(self.overflow_params)}"
            )

    def _log(self, bad: Sequence[Gradient], before: float, after: float) -> None:
        if bad:
            message = "step %d skipped: non-finite gradients in %s; loss scale %g -> %g"
            logger.warning(message, self.steps, _some(self.overflow_params), before, after)
        else:
            logger.info("loss scale %g -> %g after step %d", before, after, self.steps)


class StepView:
    """The properties of a Trainer or Module that read its ``scaled_step``, a ``ScaledStep``."""

    @property
    def scaled_step(self) -> ScaledStep:
        raise NotImplementedError

    @property
    def loss_scale(self) -> float:
        """Return the scale of the next backward, frozen from a backward to its step; set ``scaler.loss_scale``."""
        return self.scaled_step.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: Any) -> None:
        raise AttributeError(
            f"a {type(self).__name__}'s loss_scale is its scaler's: set .scaler.loss_scale = {value!r}, or create a "
            f"{type(self).__name__} with loss_scale={value!r}"
        )

    @property
    def scaler(self) -> Scaler:
        """Return the state machine that decides ``loss_scale``."""
        return self.scaled_step.scaler

    @property
    def last_step_skipped(self) -> bool:
        """Return whether the last step found a non-finite gradient and changed nothing."""
        return self.scaled_step.last_step_skipped

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps that were skipped so far."""
        return self.scaled_step.skipped_steps

    @property
    def overflow_params(self) -> tuple[str, ...]:
        """Return, after a skip, ``"name on device"`` of each non-finite gradient; nothing after a clean step."""
        return self.scaled_step.overflow_params

    @property
    def scale_history(self) -> list[ScaleEvent]:
        """Return the first scale and one event for every change of scale and every skip."""
        return list(self.scaled_step.history)


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
