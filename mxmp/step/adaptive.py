"""A loss scale that follows what is measured: gradients that are zero, and how far the largest is from overflow."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .scaler import DynamicLossScaler, check_count, check_integer, check_scale, is_number, require

__all__ = ["AdaptiveLossScaler"]

_LARGEST = 65504.0  # of float16
# A rise was useful if at most this part of the zeros remains.
_USEFUL = 0.98


def _check_largest(name: str, value: Any) -> float:
    """Return ``value`` as a float; raise ``ValueError`` unless it is a finite number of at least 0.

    ``name``: the counter that the error names.
    """
    require(is_number(value) and 0 <= value < math.inf, name, value, "a finite number from 0 on")
    return float(value)


def _check_zeros(name: str, value: Any) -> float | None:
    """Return ``value``; raise ``ValueError`` unless it is a number or None.

    ``name``: the counter that the error names.
    """
    require(value is None or is_number(value), name, value, "a number or None")
    return value


def _check_bool(name: str, value: Any) -> bool:
    """Return ``value``; raise ``ValueError`` unless it is a bool.

    ``name``: the counter that the error names.
    """
    require(isinstance(value, bool), name, value, "a bool")
    return value


class AdaptiveLossScaler(DynamicLossScaler):
    """A loss scale that is adjusted by measuring the gradients: how many of them are 0, and how large the largest is.

    Zeros are a sign of underflow, so the scale rises as long as that reduces them. It falls before the largest gradient
    overflows. A DynamicLossScaler does not measure: it needs ``growth_interval`` steps for each doubling, also to
    recover from large gradients of the first steps, and when nothing underflows it still rises until a step overflows
    and is lost.

    The gradients of the parameters are measured every ``measure_interval`` steps, and in the step after each rise or
    overflow. Two numbers are used: the share of elements that are 0, as a mean over the parameters (*zeros*), and the
    largest absolute value (*largest*), with the loss scale in it. The rules:

    1. A step with an overflow is skipped, ``scale *= backoff_factor``, and the headroom grows (see below).
    2. After ``growth_interval`` steps in a row without overflow the headroom shrinks by ``growth_factor``, and if rises
       were given up (rule 4), they are tried again.
    3. Where *largest* is above 65504 / 2, half of float16's maximum: ``scale *= backoff_factor``.
    4. Otherwise, where *zeros* is above ``max_zeros`` and a rise leaves the headroom: ``scale *= growth_factor``.
       When a rise has not reduced *zeros* by at least 2 %, rises are given up.

    The headroom is the factor that must remain between *largest* and 65504 after a rise. It is at least ``2**margin``.
    Gradients of activations are not measured and may be larger than those of parameters. So if a step overflows
    although *largest* was a factor ``f`` below 65504, the headroom becomes at least ``2 * f``.

    Zeros that no scale removes, such as those of relu or of unused rows of an embedding, cost one needless rise per
    ``growth_interval`` steps. A measurement reads the gradients once more, and needs no further wait for the device.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        As for ``DynamicLossScaler``.
    max_zeros : float
        A share of zeros, from 0 to 1, up to which the scale is not raised.
    margin : int
        The smallest headroom, as a power of two: 3 is a factor of 8.
    measure_interval : int
        Steps from one measurement to the next.

    Raises
    ------
    ValueError
        An argument is out of range; names the argument and what it must be.

    Attributes
    ----------
    ARGUMENTS, COUNTERS
        The names of what ``state_dict`` holds besides the scale: arguments of the constructor, and private counters.
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
        min_scale: float = 1.0,
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
        self.measure_interval = check_count("measure_interval", measure_interval)
        self._room = 2.0**self.margin  # the headroom
        self._largest = 0.0  # the largest absolute value of the last measurement, unscaled
        self._until_measured = 0
        self._before_rise: float | None = None  # the share of zeros before a rise, until the next measurement
        self._futile = False  # whether rises are given up
        self._measured: tuple[float, float] | None = None

    def _set(self, scale: float) -> None:
        """Set the loss scale; raise ``ValueError`` unless it is from ``min_scale`` to ``max_scale``.

        Forgets earlier measurements, which were made at another scale; the next step measures.
        """
        super()._set(scale)
        # Earlier measurements were made at another scale.
        self._largest, self._before_rise, self._futile = 0.0, None, False
        self._until_measured, self._measured = 0, None

    @property
    def measures(self) -> bool:
        """Return whether the next step must measure the gradients, and call ``note_gradients`` before ``adjust``."""
        return self._until_measured == 0

    def note_gradients(self, zeros: float, largest: float) -> None:
        """Record what was measured in this step, for the ``adjust`` that follows.

        If several trainers share the scaler, each calls it: zeros are averaged, and the larger ``largest`` counts.

        Parameters
        ----------
        zeros : float
            The share of elements that are 0, from 0 to 1, as a mean over the gradients.
        largest : float
            The largest absolute value of any gradient, multiplied by the loss scale.
        """
        if self._measured is not None:
            zeros, largest = (zeros + self._measured[0]) / 2, max(largest, self._measured[1])
        self._measured = float(zeros), float(largest)

    def adjust(self, finite: bool) -> None:
        """Raise or lower the loss scale after a training step, by the rules of the class; call once per step.

        ``finite``: True if the update was applied, False if the step was skipped for an overflow. Uses what
        ``note_gradients`` recorded in this step, if anything.
        """
        measured, self._measured = self._measured, None
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
        if measured is not None:
            self._until_measured = self.measure_interval - 1
            self._follow(*measured)

    def _note_overflow(self) -> None:
        """Lower the loss scale after an overflow, raise the headroom, and let the next step measure.

        If the last known largest gradient was a factor ``f`` below 65504 at this scale, the headroom becomes at least
        ``2 * f``.
        """
        if self._largest:
            had = _LARGEST / (self._largest * self._scale)
            self._room = min(max(self._room, 2 * had), 2.0**64)
        self._back_off()
        self._before_rise = None  # without a measurement, whether the rise was useful is not known
        self._until_measured = 0

    def _follow(self, zeros: float, largest: float) -> None:
        """Lower or raise the loss scale, or leave it, by a measurement at the current scale.

        ``zeros`` is the mean share of zeros in the gradients, ``largest`` the largest absolute value with the scale in
        it.
        """
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a dict that ``state_dict`` of an AdaptiveLossScaler returned, arguments and counters included.

        Raises ``ValueError`` for anything else; nothing has changed then.
        """
        self._load(state, AdaptiveLossScaler)

    def __repr__(self) -> str:
        return f"AdaptiveLossScaler({self._scale:g}, room={self._room:g})"
