"""Loss scalers, which are state machines that know nothing of MXNet.
Dynamic scaling follows "Mixed Precision Training" (ICLR 2018, section 3.2) with the constants of NVIDIA's and torch's
implementations; hysteresis is Megatron-LM's.
"""

from __future__ import annotations

import sys
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping, Protocol, TypeVar

T = TypeVar("T")
# The default floor: true gradients of up to 1e9, as of a regression without normalized targets, then fit into float16.
MIN_SCALE = 2.0**-14
# How many skips lead from the first loss scale, 65536, to 32, at which gradients seldom overflow.
SEARCH = 11
# Scales multiply FP32 gradients and must be normal numbers there, and so must their inverses.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127


def require(valid: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ``ValueError("NAME must be ALLOWED, got VALUE")`` if ``valid`` is False."""
    if not valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def as_positive(name: str, value: Any) -> Any:
    """Return ``value``, of the argument ``name``, as a number; an array of one element, for which it waits, has one.
    Raises ``ValueError`` unless it is a number above 0; infinity is allowed."""
    host = value.asnumpy() if hasattr(value, "asnumpy") else value
    number = host.item() if getattr(host, "size", 0) == 1 else host
    require(is_number(number) and float(number) > 0, name, value, "a positive number")
    return number


def _check_finite(name: str, value: Any) -> float:
    in_range = is_number(value) and 0 < value <= sys.float_info.max  # an int may be larger than any float
    require(in_range, name, value, "a positive finite number")
    return float(value)


def check_scale(name: str, value: Any) -> float:
    """Return ``value`` as a float; raise ``ValueError`` unless it and its inverse are positive and finite in FP32."""
    _check_finite(name, value)
    require(_SMALLEST <= value <= _LARGEST, name, value, "a positive number within FP32's range, 2**-126 to 2**127")
    return float(value)


def check_integer(name: str, value: Any) -> int:
    require(isinstance(value, Integral) and not isinstance(value, bool), name, value, "an integer")
    return int(value)


def check_count(name: str, value: Any, least: int = 1) -> int:
    require(check_integer(name, value) >= least, name, value, f"at least {least}")
    return int(value)


# Methods of scalers of other libraries (torch, Keras, mxnet.contrib.amp), and what does the same here.
_ELSEWHERE = {
    "get_scale": "read scaler.loss_scale",
    "update": "trainer.step(batch_size) adjusts the scale; to set one, write scaler.loss_scale = 1024.0",
    "step": "call trainer.step(batch_size), which unscales, checks, updates or skips, and adjusts the scale",
    "unscale_": "call trainer.unscale()",
    "has_overflow": "read trainer.last_step_skipped after trainer.step(batch_size)",
    "get_scaled_loss": "call trainer.backward(loss), which scales it",
    "get_unscaled_gradients": "call trainer.unscale()",
}


class StaticLossScaler:
    """A loss scale that never changes by itself. A step with an overflow is skipped all the same.

    Parameters
    ----------
    scale : float
        The loss scale, from 2**-126 to 2**127. With a power of two, a gradient that stays in range has the same bits
        after unscaling as without a loss scale.

    Raises
    ------
    ValueError
        ``scale`` is no such number.

    Attributes
    ----------
    ARGUMENTS, COUNTERS
        The entries that a subclass adds to ``state_dict``. ARGUMENTS: the names of arguments that the constructor takes
        after the scale, each kept in an attribute of this name. COUNTERS: the names of values that change while
        training, each kept in an attribute of this name after an underscore; and for each a function of name and
        loaded value, which returns the value or raises ``ValueError``.

    Examples
    --------
    >>> scaler = mxmp.StaticLossScaler(128.0)
    >>> scaler.adjust(False)  # the step is skipped all the same
    >>> scaler.loss_scale
    128.0
    """

    ARGUMENTS: tuple[str, ...] = ()
    COUNTERS: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}

    def __init__(self, scale: float) -> None:
        self._scale = check_scale("scale", scale)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale, which may be set, except in a NoLossScaler (``AttributeError``).

        A value outside the range that the constructor accepts raises ``ValueError``. If the scale is set between a
        backward and its step, the next backward after that step is the first to use the new value, since the gradients
        have the old scale. As with ``update(new_scale)`` of torch's GradScaler, the count of steps without overflow
        continues.
        """
        return self._scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._set(check_scale("loss_scale", value))

    def _set(self, scale: float) -> None:
        self._scale = scale

    if not TYPE_CHECKING:  # mypy would take it for a class with any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise ``AttributeError``, with a hint for names from other libraries' scalers, such as ``get_scale``."""
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @property
    def at_floor(self) -> bool:
        """Return whether an overflow cannot lower the loss scale any further. True here: a static scale never changes.

        Three skipped steps in a row at such a scale end training with a ``FloatingPointError``.
        """
        return True

    def scale(self, value: T) -> T:
        """Return ``value * loss_scale``, such as a loss before backward; ``value`` is a number or an array."""
        return value * self.loss_scale  # type: ignore

    def unscale(self, value: T) -> T:
        """Return ``value / loss_scale``, such as a gradient before the update; ``value`` is a number or an array."""
        return value / self.loss_scale  # type: ignore

    def adjust(self, finite: bool) -> None:
        """Adjust the loss scale after a training step; call once per step.

        ``finite``: True if the update was applied, False if the step was skipped for an overflow. A StaticLossScaler
        and a NoLossScaler do nothing.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return class name, loss scale, arguments and counters: ``{"kind": "StaticLossScaler", "scale": 1024.0}``.

        Subclasses add the entries that ARGUMENTS and COUNTERS name. All values are strings, numbers, bools or None.
        """
        arguments = {name: getattr(self, name) for name in self.ARGUMENTS}
        counters = {name: getattr(self, f"_{name}") for name in self.COUNTERS}
        return {"kind": type(self).__name__, "scale": self._scale, **arguments, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale, and the arguments and counters of a subclass, from a dict that ``state_dict`` returned.

        Saved arguments, such as ``growth_interval``, replace those of the constructor.

        Raises
        ------
        ValueError
            ``state`` is anything else, or of another class of scaler; nothing has changed.
        """
        # The constructor that takes the arguments: a subclass without ARGUMENTS of its own may have another one.
        self._load(state, next(each for each in type(self).__mro__ if "ARGUMENTS" in vars(each)))

    def _load(self, state: Any, kind: Callable[..., StaticLossScaler]) -> None:
        """Take over ``state``; raise ``ValueError``, with nothing changed, if it or a value in it is refused."""
        own = self.state_dict()
        if not isinstance(state, dict) or state.keys() != own.keys() or state["kind"] != own["kind"]:
            raise ValueError(f"not a state of {own['kind']}: expected the keys {sorted(own)}, got {state!r}")
        fresh = kind(state["scale"], **{name: state[name] for name in self.ARGUMENTS})
        counters = {f"_{name}": check(name, state[name]) for name, check in self.COUNTERS.items()}
        vars(self).update({**vars(fresh), **counters})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scale:g})"


class NoLossScaler(StaticLossScaler):
    """A loss scale of 1, for bfloat16 and FP32, whose range needs no scaling. A step with an overflow is skipped.

    Examples
    --------
    >>> mxmp.NoLossScaler().loss_scale
    1.0
    """

    def __init__(self) -> None:
        super().__init__(1.0)

    def _set(self, scale: float) -> None:
        raise AttributeError(
            f"NoLossScaler has the scale 1, always, and cannot be set to {scale:g}: give the Trainer or Module "
            "loss_scale='dynamic', a number, or mxmp.DynamicLossScaler()"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that ``state`` is what ``state_dict`` of a NoLossScaler returns; otherwise raise ``ValueError``."""
        self._load(state, lambda scale: NoLossScaler())

    def __repr__(self) -> str:
        return "NoLossScaler()"


class DynamicLossScaler(StaticLossScaler):
    """A loss scale that by default is halved on overflow, and doubled after 2000 steps in a row without one.

    Parameters
    ----------
    init_scale : float
        Scale of the first backward.
    growth_factor : float
        What the scale is multiplied by to raise it; above 1. If ``init_scale`` and both factors are powers of two, a
        gradient that stays in range has the same bits after unscaling as without a loss scale.
    backoff_factor : float
        What the scale is multiplied by after an overflow; between 0 and 1, best a power of two.
    growth_interval : int
        How many steps in a row without overflow raise the scale.
    min_scale, max_scale : float
        The scale never leaves this range. Both from 2**-126 to 2**127. A scale below 1 is for gradients above 65504,
        as of a regression whose targets are in the hundreds.
    hysteresis : int
        The first ``hysteresis - 1`` overflows leave the scale as it is; every further one lowers it. The count starts
        again after ``growth_interval`` steps in a row without overflow, as in Megatron-LM. 1: every overflow lowers it.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it and says what it must be.

    Examples
    --------
    >>> scaler = mxmp.DynamicLossScaler(init_scale=1024.0, growth_interval=2)
    >>> for finite in (False, True, True):  # as trainers call it, once a step
    ...     scaler.adjust(finite)
    ...     print(scaler.loss_scale)
    512.0
    512.0
    1024.0
    """

    ARGUMENTS: tuple[str, ...] = (
        *("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "hysteresis"),
    )
    COUNTERS: ClassVar = {"clean_steps": partial(check_count, least=0), "tolerance": check_integer}

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        super().__init__(check_scale("init_scale", init_scale))
        self.growth_factor = _check_finite("growth_factor", growth_factor)
        self.backoff_factor = _check_finite("backoff_factor", backoff_factor)
        self.growth_interval = check_count("growth_interval", growth_interval)
        self.min_scale = check_scale("min_scale", min_scale)
        self.max_scale = check_scale("max_scale", max_scale)
        self.hysteresis = check_count("hysteresis", hysteresis)
        require(self.growth_factor > 1, "growth_factor", growth_factor, "above 1")
        require(self.backoff_factor < 1, "backoff_factor", backoff_factor, "below 1")
        in_range, limits = self.min_scale <= self._scale <= self.max_scale, f"{min_scale} and {max_scale}"
        require(in_range, "init_scale", init_scale, f"between min_scale and max_scale, {limits}")
        self._clean_steps = 0
        self._tolerance = self.hysteresis

    def _set(self, scale: float) -> None:
        if not self.min_scale <= scale <= self.max_scale:
            limits = f"between min_scale={self.min_scale:g} and max_scale={self.max_scale:g}"
            raise ValueError(f"loss_scale must lie {limits}, got {scale:g}")
        self._scale = scale

    @property
    def at_floor(self) -> bool:
        """Return whether the loss scale is ``min_scale``, so that an overflow cannot lower it."""
        return self._scale <= self.min_scale

    def adjust(self, finite: bool) -> None:
        """Raise or lower the loss scale after a training step; call once per step.

        ``finite``: True if the update was applied, False if the step was skipped for an overflow. An overflow
        multiplies the scale by ``backoff_factor``, except for the first ``hysteresis - 1``; ``growth_interval`` steps
        in a row without overflow multiply it by ``growth_factor``, and overflows are then counted from 0 again. The
        scale never leaves the range from ``min_scale`` to ``max_scale``.
        """
        if finite:
            self._clean_steps += 1
            if self._clean_steps >= self.growth_interval:
                self._scale = min(self._scale * self.growth_factor, self.max_scale)
                self._clean_steps = 0
                self._tolerance = self.hysteresis
        else:
            self._back_off()

    def _back_off(self) -> None:
        """Lower the loss scale, unless the overflow is one of the first ``hysteresis - 1``."""
        self._clean_steps = 0
        self._tolerance -= 1
        if self._tolerance <= 0:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)

    def __repr__(self) -> str:
        return f"DynamicLossScaler({self._scale:g}, clean_steps={self._clean_steps}/{self.growth_interval})"


class Scaler(Protocol):
    """What a step needs of a loss scaler, which may be of a user's own class."""

    loss_scale: float

    def adjust(self, finite: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def as_scaler(loss_scale: Any, *, only_bfloat16: bool = False) -> Scaler:
    """Return the scaler for a user's ``loss_scale``; for anything else a ``ValueError`` guesses what was meant."""
    if loss_scale is None:
        return NoLossScaler()
    if isinstance(loss_scale, str):
        if loss_scale == "dynamic":
            return NoLossScaler() if only_bfloat16 else DynamicLossScaler()  # bfloat16 has FP32's range
    elif is_number(loss_scale):
        return StaticLossScaler(check_scale("loss_scale", loss_scale))
    elif not isinstance(loss_scale, type) and all(
        hasattr(loss_scale, name) for name in ("loss_scale", "adjust", "state_dict", "load_state_dict")
    ):
        return loss_scale
    raise ValueError(
        "loss_scale must be 'dynamic', a positive number, None or a scaler such as mxmp.DynamicLossScaler(), "
        f"got {loss_scale!r}{_hint(loss_scale)}"
    )


def _hint(loss_scale: Any) -> str:
    if isinstance(loss_scale, type):
        return f"; a scaler is an object: {loss_scale.__name__}(...)"
    word = str(loss_scale).strip().lower()
    if word in ("auto", "dynamic", "true"):
        return "; did you mean 'dynamic'?"
    if word in ("none", "false", "off"):
        return "; did you mean None, for no scaling?"
    if isinstance(loss_scale, str) and word.replace(".", "", 1).isdecimal():
        return f"; did you mean the number {word}?"
    if hasattr(loss_scale, "get_scale"):
        return "; mxmp.DynamicLossScaler(init_scale=..., growth_interval=...) is what torch's GradScaler is"
    if getattr(loss_scale, "shape", None) in [(), (1,)]:
        return "; did you mean float(...) of it?"
    return ""
