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

from .floor import cure
from .gradients import FiniteSums, Gradient, fetch, non_finite, zeros_and_peaks
from .masters import MasterPair, distances, take_over
from .scaler import Scaler, group_of
from .statistics import RunningStatistics

logger = logging.getLogger("mxmp")

# Skips in a row at the lowest scale after which the gradients are at fault, not the scale.
FLOOR_PATIENCE = 3


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


class ScaledStep:
    """Decides in each training step of one trainer whether the update is applied; keeps loss scale and counters.

    A Trainer, a Module or a BucketingModule has one for its whole life, and saves its state in the states file.

    Attributes
    ----------
    scaler : Scaler
        Decides the loss scale. Several trainers may have the same object.
    group : ScalerGroup
        The ScaledSteps of all trainers that have this very scaler object.
    scaled_by : float or None
        The loss scale in the present gradients; None if no backward has run since the last step.
    steps, skipped_steps : int
        How many training steps were taken, skipped ones included; how many of these were skipped.
    last_step_skipped : bool
        Whether the last step found an overflow, and so changed no weight.
    overflow_params : tuple of str
        ``"name on device"`` of each gradient with an overflow in the last step; empty after an applied step.
    history : list of ScaleEvent
        One event for the first loss scale, one for every skipped step, and one for every other change of the scale.
    observers : list of Observer
        Diagnostics that are notified of each step; neither copied nor saved.
    """

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler
        self.group = group_of(scaler)
        self.scaled_by: float | None = None
        self.steps = 0
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.overflow_params: tuple[str, ...] = ()
        self.history = [ScaleEvent(1, scaler.loss_scale, False)]
        self.observers: list[Observer] = []
        self._sums: FiniteSums | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for ``copy`` and ``pickle``, without ``group``, ``observers`` and ``_sums``.

        A copy joins the group of the scaler that it has, and makes its ``_sums``, the check for overflows, in its first
        step. The result also has the key ``"skips_at_floor"``: how many steps in a row this object has skipped at a
        loss scale that an overflow cannot lower. The copy continues this count.
        """
        own = {name: value for name, value in vars(self).items() if name not in ("group", "_sums", "observers")}
        return {**own, "skips_at_floor": self.group.skips_at_floor.get(self, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up a copy, which joins the group of the scaler in ``state``.

        It has no observers, and ``scaled_by`` is None: no backward has written its gradients.
        """
        own = {name: value for name, value in state.items() if name != "skips_at_floor"}
        vars(self).update(own, group=group_of(state["scaler"]), scaled_by=None, _sums=None, observers=[])
        self.group.skips_at_floor[self] = state["skips_at_floor"]

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in the present gradients, or that of the next backward if there are none.

        It does not change between a backward and its step, even if the user sets ``scaler.loss_scale`` in between.
        """
        return self.group.loss_scale if self.scaled_by is None else self.scaled_by

    def note_own_backward(self, adds: bool) -> None:
        """Record that a backward begins which writes gradients of this trainer only, and which loss scale they contain.

        For a Module. A Gluon backward may write the gradients of several trainers, so ``ScalerGroup.note_backward``
        records it. ``adds``: the backward adds to the present gradients (``grad_req="add"``), so it must use their loss
        scale; without gradients since the last step, or with ``adds=False``, it uses the scaler's.
        """
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
        """Check ``gradients`` for overflows, then call ``apply`` or skip the update, and adjust the loss scale.

        Returns whether the update was applied. Waits for the device once, again if an inf or NaN is found, and for each
        row-sparse gradient.

        Parameters
        ----------
        gradients : sequence of Gradient
            The gradients on all devices, summed over devices and workers, so that all workers take the same decision.
        apply : callable
            Updates the weights. Not called if a gradient has an overflow.
        statistics : RunningStatistics or None
            BatchNorm's running statistics, which are restored where an overflow has made them inf or NaN. None: no
            statistics are restored.
        exposed : sequence of MasterPair
            The FP32 master and the float16 array of each parameter into whose float16 array a user may have written.
            What was written is copied to the master before ``apply``, so that the update starts from it.
        unscaled : bool
            Whether the gradients have been divided by the loss scale already. If True, a scaler that measures
            gradients receives their largest value multiplied by the loss scale. The check for overflows is the same.

        Raises
        ------
        FloatingPointError
            After 3 (``FLOOR_PATIENCE``) skipped steps in a row at a loss scale that an overflow cannot lower, such as
            any of a StaticLossScaler; names the parameters.
        """
        bad, written = self._check(gradients, statistics or RunningStatistics(), exposed, unscaled)
        self.overflow_params = tuple(str(g) for g in bad)
        for observer in self.observers:
            observer.before_update(gradients)
        try:
            if not bad:
                for pair in written:
                    take_over(*pair)
                apply()
            self._note(gradients, bad, unscaled)
        finally:
            for observer in list(self.observers):
                observer.after_step()
        return not bad

    @property
    def at_floor(self) -> bool:
        """Return whether an overflow cannot lower the loss scale; False if a user's own scaler has no ``at_floor``."""
        return getattr(self.scaler, "at_floor", False)

    def restart_floor_count(self) -> None:
        """Set to 0 the count of skipped steps in a row that would end in ``FloatingPointError`` (see ``run``).

        Does so for all trainers that have the same scaler, since one backward may write the gradients of several.
        ``guard`` calls it in a step in which it has found the layer that overflows: after some of these steps it moves
        the layer to FP32.
        """
        self.group.skips_at_floor.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return scaler state, step counters and history as plain data, from which ``load_state_dict`` continues."""
        return {
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "last_step_skipped": self.last_step_skipped,
            "skips_at_floor": self.group.skips_at_floor.get(self, 0),
            "overflow_params": list(self.overflow_params),
            "history": [list(event) for event in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set scaler, step counters and the history of loss scales to a state that ``state_dict`` returned.

        If the state is of another class of scaler, a warning is logged, and only the scaler stays as it is. Raises
        ``ValueError``, with nothing changed, if ``state`` is no such state.
        """
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
        self.steps, self.skipped_steps, self.group.skips_at_floor[self] = steps, skipped, at_floor
        self.last_step_skipped, self.overflow_params, self.history = last, names, history

    def _check(
        self,
        gradients: Sequence[Gradient],
        statistics: RunningStatistics,
        exposed: Sequence[MasterPair],
        unscaled: bool,
    ) -> tuple[list[Gradient], list[MasterPair]]:
        """Return the gradients with an overflow, and those pairs of ``exposed`` into which a user has written.

        Also keeps the present ``statistics``, or restores the kept ones if a gradient or a statistic is inf or NaN. If
        the scaler's ``measures`` is True and no gradient has an overflow, calls the scaler's ``note_gradients`` with
        measurements of the gradients. ``unscaled`` says that these have been divided by the loss scale: then the
        largest value is multiplied by it. All numbers come to the host in one transfer; a second one follows only if
        the number that ``FiniteSums`` computes from a gradient is not finite.
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
            largest *= self.scaler.loss_scale / self.loss_scale  # a user may have set it since the backward
            self.scaler.note_gradients(float(zeros.mean()), largest)  # type: ignore[attr-defined]
        return bad, [pair for pair, distance in zip(exposed, far) if distance != 0]

    def _note(self, gradients: Sequence[Gradient], bad: Sequence[Gradient], unscaled: bool) -> None:
        """Record a finished step: update counters, history and the loss scale, and log a skip or a change of the scale.

        ``bad`` holds the ``gradients`` with an overflow. Raises ``FloatingPointError`` after the third
        (``FLOOR_PATIENCE``) skipped step in a row at a loss scale that an overflow cannot lower.
        """
        self.steps += 1
        self.last_step_skipped = bool(bad)
        at_floor, before = self.at_floor, self.loss_scale
        if before != self.history[-1].loss_scale:  # a user set it, or the step of another trainer
            self.history.append(ScaleEvent(self.steps, before, False))
        self.group.note_step(self, not bad)
        after = self.scaler.loss_scale
        if bad:
            self.skipped_steps += 1
        if bad or after != before:
            self.history.append(ScaleEvent(self.steps + 1, after, bool(bad)))
            self._log(bad, before, after)
        skips = self.group.skips_at_floor[self] = self.group.skips_at_floor.get(self, 0) + 1 if bad and at_floor else 0
        if skips >= FLOOR_PATIENCE:
            raise FloatingPointError(
                f"{skips} steps in a row had non-finite gradients at a loss scale of {before:g}, which "
                f"{self.scaler!r} does not lower; {cure(gradients, bad, before, self.scaler, unscaled)}. Weights are "
                f"unchanged. Non-finite: {_some(self.overflow_params)}"
            )

    def _log(self, bad: Sequence[Gradient], before: float, after: float) -> None:
        """Log a skipped step as a warning, or, if ``bad`` is empty, a change of the loss scale as information.

        ``bad`` holds the gradients with an overflow; ``before`` and ``after`` are the scales of this step and the next.
        """
        if bad:
            message = "step %d skipped: non-finite gradients in %s; loss scale %g -> %g"
            logger.warning(message, self.steps, _some(self.overflow_params), before, after)
        else:
            logger.info("loss scale %g -> %g after step %d", before, after, self.steps)


class StepView:
    """The properties that a Trainer, a Module and a BucketingModule share: their loss scale, scaler and counters.

    Each property reads the object's ScaledStep, which checks the gradients in each step and counts the steps.
    """

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


def _some(names: Sequence[str], limit: int = 3) -> str:
    """Return the first ``limit`` names, joined by commas, and how many more there are: ``"a, b, c and 2 more"``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
