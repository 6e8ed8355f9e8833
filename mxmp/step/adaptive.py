"""A loss scale that follows what is measured: gradients that are zero, and how far the largest is from overflow."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .scaler import DynamicLossScaler, check_count, check_integer, check_scale, is_number, require

__all__ = ["AdaptiveLossScaler"]

_LARGEST = 65504.0  # of float16
# A higher scale is worth it if it leaves at most this part of the zeros.
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
    """A scale that rises as long as gradients are zero that a higher scale brings back, and falls before they overflow.

    Every ``measure_interval`` steps, and after each rise at once, the parameters' gradients are measured: the share
    that is zero, as a mean over the parameters, and the largest value. The rules::

        overflow:                                     skip, scale * backoff_factor, and keep more room (below)
        the largest is within a factor 2 of 65504:    scale * backoff_factor
        zeros > max_zeros, the room would remain,
            and the last rise brought some back:      scale * growth_factor
        growth_interval clean steps in a row:         keep less room by growth_factor; rises are tried again

    The room is what a rise must leave between the largest measured gradient and 65504, at least ``2**margin``. Where
    an overflow comes with less than it had, what overflowed is larger than what is measured (a gradient of an
    activation) by that much: the room grows to twice of it.

    So unlike ``DynamicLossScaler`` it does not wait 2,000 steps for a power of two that gradients need, least of all
    after large gradients of the first steps have brought the scale down, and does not rise to where a step is lost
    when they need none. Zeros that no scale removes (of relu, or of rows of an embedding that a batch does not use)
    cost one rise in ``growth_interval`` steps. A measurement reads the gradients once more and needs no further wait
    for the device.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        As for ``DynamicLossScaler``.
    max_zeros : float
        Share of zeros, from 0 to 1, that needs no higher scale.
    margin : int
        Powers of two that a rise leaves between the largest gradient and 65504, float16's largest number. The
        gradients of activations are not measured and may be larger.
    measure_interval : int
        Steps from one measurement to the next.

    Raises
    ------
    ValueError
        Names the argument and what it must be.
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
        self._room = 2.0**self.margin
        self._largest = 0.0  # at scale 1, when it was measured last
        self._until_measured = 0
        self._before_rise: float | None = None  # the share of zeros before the last rise, until it was measured again
        self._futile = False
        self._measured: tuple[float, float] | None = None

    def _set(self, scale: float) -> None:
        super()._set(scale)
        # What was measured, and what a rise brought back, was at another scale.
        self._largest, self._before_rise, self._futile = 0.0, None, False
        self._until_measured, self._measured = 0, None

    @property
    def measures(self) -> bool:
        """Return whether the next step must measure the gradients for ``note_gradients``."""
        return self._until_measured == 0

    def note_gradients(self, zeros: float, largest: float) -> None:
        """Note, before ``adjust``, the share of zeros, and the largest absolute value at the current scale.

        Each trainer that shares the scaler calls it; the mean and the maximum count.
        """
        if self._measured is not None:
            zeros, largest = (zeros + self._measured[0]) / 2, max(largest, self._measured[1])
        self._measured = float(zeros), float(largest)

    def adjust(self, finite: bool) -> None:
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
        if self._largest:
            had = _LARGEST / (self._largest * self._scale)
            self._room = min(max(self._room, 2 * had), 2.0**64)
        self._back_off()
        self._before_rise = None  # what the rise brought back is not known
        self._until_measured = 0

    def _follow(self, zeros: float, largest: float) -> None:
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
        self._load(state, AdaptiveLossScaler)

    def __repr__(self) -> str:
        return f"AdaptiveLossScaler({self._scale:g}, room={self._room:g})"
