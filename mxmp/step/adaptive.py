"""A loss scale that follows what is measured: gradients that are zero, and how far the largest is from overflow."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, ClassVar

from .scaler import MIN_SCALE, DynamicLossScaler, check_count, check_integer, check_scale, is_number, require

_LARGEST = 65504.0  # of float16
# A rise was useful if at most this part of the zeros remains.
_USEFUL = 0.98


def _check_largest(name: str, value: Any) -> float:
    require(is_number(value) and 0 <= value < math.inf, name, value, "a finite number from 0 on")
    return float(value)


def _check_zeros(name: str, value: Any) -> float | None:
    require(value is None or is_number(value), name, value, "a number or None")
    return value


def _check_bool(name: str, value: Any) -> bool:
    require(isinstance(value, bool), name, value, "a bool")
    return value


class AdaptiveLossScaler(DynamicLossScaler):
    """A loss scale that is adjusted by measuring the gradients: how many elements are 0, and how large the largest is.

    Zeros are a sign of underflow, so the scale is raised as long as this reduces them. It is lowered before the largest
    gradient overflows. A DynamicLossScaler does not measure: it doubles the scale only every ``growth_interval`` steps,
    and also when nothing underflows, until a step overflows and is lost.

    The gradients of the parameters are measured every ``measure_interval`` steps, and in the step after each rise or
    overflow. A measurement gives two numbers. *zeros* is the share of elements that are 0, computed for each parameter
    and averaged over the parameters. *largest* is the largest absolute value of an element, with the loss scale in it.
    The headroom, at first ``2**margin``, is the factor by which *largest* must stay below 65504, float16's maximum,
    after a rise. The rules:

    1. A step with an overflow is skipped. ``scale *= backoff_factor``, unless the overflow is one of the first
       ``hysteresis - 1``. After any overflow, if the last *largest*, converted to the scale of the skipped step, is a
       factor ``f`` below 65504, something that is not measured has overflowed, such as the gradient of an activation;
       the headroom becomes at least ``2 * f``.
    2. After ``growth_interval`` steps in a row without overflow the scale stays, but the headroom is divided by
       ``growth_factor`` (not below ``2**margin``), rises that rule 4 stopped are permitted again, and overflows are
       counted from 0 again for ``hysteresis``.
    3. If *largest* is above 65504 / 2: ``scale *= backoff_factor``.
    4. Otherwise, if *zeros* is above ``max_zeros`` and a rise leaves the headroom: ``scale *= growth_factor``. If the
       next measurement shows that the rise has made *zeros* less than 2 % smaller, further rises are stopped.

    Zeros that no scale removes, such as those of relu or of unused rows of an embedding, cost one useless rise per
    ``growth_interval`` steps. A measurement reads the gradients once more, and needs no further wait for the device.

    Parameters
    ----------
    init_scale, min_scale, max_scale : float
        The first loss scale, and the range that the scale never leaves.
    growth_factor, backoff_factor : float
        What the scale is multiplied by to raise and to lower it: above 1, and between 0 and 1.
    growth_interval, hysteresis : int
        The number of steps in rule 2, and the number of overflows in rule 1.
    max_zeros : float
        A share of zeros, from 0 to 1, up to which the scale is not raised.
    margin : int
        The smallest headroom, as a power of two: 3 is a factor of 8.
    measure_interval : int
        Steps from one measurement to the next.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it and says what it must be.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> scaler = mxmp.AdaptiveLossScaler()
    >>> trainer = mxmp.Trainer(mxmp.convert(net, "float16").collect_params(), "adam", loss_scale=scaler)
    >>> scaler.loss_scale
    65536.0
    """

    ARGUMENTS = (*DynamicLossScaler.ARGUMENTS, "max_zeros", "margin", "measure_interval")
    COUNTERS: ClassVar = {
        **DynamicLossScaler.COUNTERS,
        "room": check_scale,
        "largest": _check_largest,
        "until_measured": check_integer,
        "before_rise": _check_zeros,
        "futile": _check_bool,
    }

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
        max_scale: float = 2.0**40,
        hysteresis: int = 1,
        max_zeros: float = 1e-3,
        margin: int = 3,
        measure_interval: int = 20,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis)
        require(is_number(max_zeros) and 0 <= max_zeros <= 1, "max_zeros", max_zeros, "a number from 0 to 1")
        self.max_zeros = float(max_zeros)
        self.margin = check_count("margin", margin)
        require(self.margin < 16, "margin", margin, "below 16: float16 ends at 2**16")
        self.measure_interval = check_count("measure_interval", measure_interval)
        self._room = 2.0**self.margin  # the headroom
        self._largest = 0.0  # the largest absolute value of the last measurement, unscaled
        self._until_measured = 0
        self._before_rise: float | None = None  # the share of zeros before a rise, until the next measurement
        self._futile = False  # whether rises are given up
        self._measured: list[tuple[float, float]] = []

    def _set(self, scale: float) -> None:
        super()._set(scale)
        # Earlier measurements were made at another scale. The headroom stays.
        self._largest, self._before_rise, self._futile = 0.0, None, False
        self._until_measured, self._measured = 0, []

    @property
    def measures(self) -> bool:
        """Return whether the trainer must measure the next step's gradients, and pass the result to ``note_gradients``.

        It is True for the first step, ``measure_interval`` steps after a measurement, and in the step after the scale
        was raised, after an overflow, and after a user has set the scale.
        """
        return self._until_measured == 0

    def note_gradients(self, zeros: float, largest: float) -> None:
        """Record a measurement of this step's gradients, by which the next ``adjust`` changes the loss scale.

        ``zeros`` is the share of elements that are 0, from 0 to 1, computed for each gradient and averaged over the
        gradients. ``largest`` is the largest absolute value of an element of any gradient, multiplied by the loss
        scale. If several trainers share the scaler, each calls it before the one ``adjust``, which takes the largest
        ``largest`` and the mean of ``zeros``.
        """
        self._measured.append((float(zeros), float(largest)))

    def adjust(self, finite: bool) -> None:
        """Raise or lower the loss scale after a training step, by the rules of the class; call once per step.

        ``finite`` is False if the step was skipped for an overflow, and True if the update was applied. After an
        applied update the scale changes only if ``note_gradients`` has recorded a measurement in this step.
        """
        measured, self._measured = self._measured, []
        self._until_measured = max(self._until_measured - 1, 0)
        if not finite:
            self._note_overflow()
            return
        self._clean_steps += 1
        if self._clean_steps >= self.growth_interval:
            self._clean_steps = 0
            self._tolerance = self.hysteresis
            self._room = max(self._room / self.growth_factor, 2.0**self.margin)
            self._futile, self._before_rise = False, None
        if measured:
            self._until_measured = self.measure_interval - 1
            zeros, largest = zip(*measured)
            self._follow(fmean(zeros), max(largest))

    def _note_overflow(self) -> None:
        """Lower the loss scale by rule 1 of the class; require a measurement in the next step."""
        # 0 if nothing was measured since the start, or since a user set the scale: the headroom stays.
        if self._largest:
            had = _LARGEST / (self._largest * self._scale)
            self._room = min(max(self._room, 2 * had), 2.0**64)
        self._back_off()
        self._before_rise = None  # without a measurement, whether the rise was useful is not known
        self._until_measured = 0

    def _follow(self, zeros: float, largest: float) -> None:
        """Change the loss scale by rules 3 and 4 of the class; ``largest`` contains the loss scale."""
        before, self._before_rise = self._before_rise, None
        self._largest = largest / self._scale
        if largest * 2 > _LARGEST:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._futile = self._futile or (before is not None and zeros > before * _USEFUL)
        higher = min(self._scale * self.growth_factor, self.max_scale)
        fits = self._largest * higher * self._room <= _LARGEST
        if zeros > self.max_zeros and higher > self._scale and fits and not self._futile:
            self._scale, self._before_rise = higher, zeros
            self._until_measured = 0

    def __repr__(self) -> str:
        return f"AdaptiveLossScaler({self._scale:g}, room={self._room:g})"
