"""Loss scalers: pure state machines that know nothing of MXNet; and the steps that share one.

All have the same four methods, so no caller needs to know which one it has::

    scaled = scaler.scale(loss)            # before backward
    grad = scaler.unscale(scaled_grad)     # before the update
    scaler.adjust(finite)                  # after the step: True for a clean one, False for a skipped
    scaler.state_dict() / load_state_dict(state)

Dynamic scaling follows "Mixed Precision Training" (ICLR 2018, section 3.2) with the constants of
NVIDIA's and torch's implementations; hysteresis is Megatron-LM's.
"""

from __future__ import annotations

import math
import weakref
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping, TypeVar

__all__ = [
    "DynamicLossScaler",
    "NoLossScaler",
    "Scaler",
    "ScalerGroup",
    "StaticLossScaler",
    "as_scaler",
    "check_count",
    "check_integer",
    "check_positive",
    "check_scale",
    "group_of",
    "is_number",
    "require",
]

T = TypeVar("T")
# Scales multiply FP32 gradients and must be normal numbers there, and so must their inverses.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127


def require(valid: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ``ValueError`` unless ``valid``: the value of the argument ``name`` must be what ``allowed`` says."""
    if not valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def is_number(value: Any) -> bool:
    """Return whether it is a number: NumPy's are, ``True`` is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless it is a number above 0, NumPy's and infinity included."""
    require(is_number(value) and float(value) > 0, name, value, "a positive number")


def _check_finite(name: str, value: Any) -> float:
    require(is_number(value) and 0 < value < math.inf, name, value, "a positive finite number")
    return float(value)


def check_scale(name: str, value: Any) -> float:
    _check_finite(name, value)
    require(_SMALLEST <= value <= _LARGEST, name, value, "a positive number within FP32's range, 2**-126 to 2**127")
    return float(value)


def check_integer(name: str, value: Any) -> int:
    require(isinstance(value, Integral) and not isinstance(value, bool), name, value, "an integer")
    return int(value)


def check_count(name: str, value: Any, least: int = 1) -> int:
    require(check_integer(name, value) >= least, name, value, f"at least {least}")
    return int(value)


def _check_not_negative(name: str, value: Any) -> int:
    return check_count(name, value, least=0)


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
    """A constant loss scale. A step with non-finite gradients is skipped all the same.

    Parameters
    ----------
    scale : float
        Positive and finite. A power of two changes no bit of a gradient that stays in range.
    """

    # What a state holds besides the scale: arguments of the constructor, and private attributes with their checks.
    ARGUMENTS: tuple[str, ...] = ()
    COUNTERS: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}

    def __init__(self, scale: float) -> None:
        self._scale = check_scale("scale", scale)

    @property
    def loss_scale(self) -> float:
        """Return the factor of the next backward. May be set, to what the constructor takes.

        A value that is set between a backward and its step holds from the first backward after that step, since the
        gradients have the old scale. As with ``update(new_scale)`` of torch's GradScaler, the count of clean steps
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
            """Raise ``AttributeError``, which for a method of another library's scaler says what does that here."""
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @property
    def at_floor(self) -> bool:
        """Return whether an overflow cannot lower the scale any further."""
        return True

    def scale(self, value: T) -> T:
        """Return ``value * loss_scale``."""
        return value * self.loss_scale  # type: ignore

    def unscale(self, value: T) -> T:
        """Return ``value / loss_scale``."""
        return value / self.loss_scale  # type: ignore

    def adjust(self, finite: bool) -> None:
        """Adjust the scale after a step: ``finite`` says whether it was applied."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers that ``load_state_dict`` of the same class continues from."""
        arguments = {name: getattr(self, name) for name in self.ARGUMENTS}
        counters = {name: getattr(self, f"_{name}") for name in self.COUNTERS}
        return {"kind": type(self).__name__, "scale": self._scale, **arguments, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. Raises ``ValueError``, changing nothing, on any other dict."""
        self._load(state, StaticLossScaler)

    def _load(self, state: Any, kind: Callable[..., StaticLossScaler]) -> None:
        """Continue from the state of a scaler that ``kind(scale, **arguments)`` constructs, which checks them."""
        own = self.state_dict()
        if not isinstance(state, dict) or state.keys() != own.keys() or state["kind"] != own["kind"]:
            raise ValueError(f"not a state of {own['kind']}: expected the keys {sorted(own)}, got {state!r}")
        fresh = kind(state["scale"], **{name: state[name] for name in self.ARGUMENTS})
        counters = {f"_{name}": check(name, state[name]) for name, check in self.COUNTERS.items()}
        vars(self).update({**vars(fresh), **counters})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scale:g})"


class NoLossScaler(StaticLossScaler):
    """Scale 1: for bfloat16 and FP32, whose range needs no scaling. Non-finite steps are still skipped."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def _set(self, scale: float) -> None:
        raise AttributeError(
            f"NoLossScaler has the scale 1, always, and cannot be set to {scale:g}: give the Trainer or Module "
            "loss_scale='dynamic', a number, or mxmp.DynamicLossScaler()"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load(state, lambda scale: NoLossScaler())

    def __repr__(self) -> str:
        return "NoLossScaler()"


class DynamicLossScaler(StaticLossScaler):
    """A scale that halves on overflow and doubles after ``growth_interval`` clean steps in a row.

    Parameters
    ----------
    init_scale : float
        Scale of the first backward.
    growth_factor, backoff_factor : float
        Above 1 and between 0 and 1. Powers of two change no bit of a gradient that stays in range.
    growth_interval : int
        Clean steps in a row after which the scale grows.
    min_scale, max_scale : float
        Floor and ceiling, within FP32's range.
    hysteresis : int
        Overflows that it takes to back off: 1 backs off on each. The count is restored when the scale grows, as in
        Megatron-LM.

    Raises
    ------
    ValueError
        Names the argument and what it must be.
    """

    ARGUMENTS: tuple[str, ...] = (
        *("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "hysteresis"),
    )
    COUNTERS: ClassVar = {"clean_steps": _check_not_negative, "tolerance": check_integer}

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
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
        return self._scale <= self.min_scale

    def adjust(self, finite: bool) -> None:
        if finite:
            self._clean_steps += 1
            if self._clean_steps >= self.growth_interval:
                self._scale = min(self._scale * self.growth_factor, self.max_scale)
                self._clean_steps = 0
                self._tolerance = self.hysteresis
        else:
            self._back_off()

    def _back_off(self) -> None:
        self._clean_steps = 0
        self._tolerance -= 1
        if self._tolerance <= 0:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load(state, DynamicLossScaler)

    def __repr__(self) -> str:
        return f"DynamicLossScaler({self._scale:g}, clean_steps={self._clean_steps}/{self.growth_interval})"


Scaler = StaticLossScaler


def as_scaler(loss_scale: Any, *, low_range: bool = True) -> Scaler:
    """Return a scaler for what ``loss_scale=`` takes: ``"dynamic"``, a number, None or a scaler.

    ``low_range``: False for a network that computes in bfloat16 only, where ``"dynamic"`` means no scaling.

    Raises
    ------
    ValueError
        For anything else.
    """
    if loss_scale is None:
        return NoLossScaler()
    if isinstance(loss_scale, str):
        if loss_scale == "dynamic":
            return DynamicLossScaler() if low_range else NoLossScaler()
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
    """Return what the user probably meant, or an empty string."""
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


class ScalerGroup:
    """The steps that share one scaler object, and those of them that have not been taken since the last backward.

    The scale is frozen until each has been taken, and adjusts once.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = weakref.proxy(scaler)
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._finite = True

    @property
    def loss_scale(self) -> float:
        """Return the scale of the next backward: that of the last one until all steps are taken, then the scaler's."""
        return next((member.scaled_by for member in self._waiting), self._scaler.loss_scale)

    def join(self, member: Any) -> None:
        self._members.add(member)

    def note_backward(self) -> None:
        """Note a backward that serves all members."""
        scale = self.loss_scale
        self._waiting = weakref.WeakSet(self._members)
        for member in self._waiting:
            member.scaled_by = scale

    def note_step(self, member: Any, finite: bool) -> None:
        """Note that ``member`` has stepped. The last one adjusts the scale: an overflow of any is an overflow."""
        self._finite = self._finite and finite
        self._stop_waiting(member)
        if not self._waiting:
            self._scaler.adjust(self._finite)
            self._finite = True

    def forget_backward(self, member: Any) -> None:
        """Note that the gradients of ``member`` are gone, and it will not step."""
        self._stop_waiting(member)
        if not self._waiting:
            self._finite = True

    def _stop_waiting(self, member: Any) -> None:
        member.scaled_by = None
        self._waiting.discard(member)


# Global: the group of each scaler that exists. Trainers share one by being passed the same object, which may be of a
# user's own class, so it is not stored there.
_groups: weakref.WeakKeyDictionary[Scaler, ScalerGroup] = weakref.WeakKeyDictionary()


def group_of(scaler: Scaler) -> ScalerGroup:
    """Return the one group of this scaler object."""
    return _groups.setdefault(scaler, ScalerGroup(scaler))
