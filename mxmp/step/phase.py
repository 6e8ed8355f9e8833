"""Where between two steps a trainer is, and what it may do there.

====================  ============  ================================================================
phase                 the gradients are
====================  ============  ================================================================
``READY``             of no backward of ours
``SCALED``            scaled        each device's own
``REDUCED``           scaled        summed over devices and workers
``CLIPPED``           scaled        summed; the update multiplies by ``clip``
``UNSCALED``          true          each device's own
``UNSCALED_REDUCED``  true          summed
``UNSCALED_CLIPPED``  true          summed; the update multiplies by ``clip``
====================  ============  ================================================================
"""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["Event", "Phase", "Progress"]


class Phase(enum.Enum):
    """The phases, in the order in which a step goes through them."""

    READY = enum.auto()
    SCALED = enum.auto()
    REDUCED = enum.auto()
    CLIPPED = enum.auto()
    UNSCALED = enum.auto()
    UNSCALED_REDUCED = enum.auto()
    UNSCALED_CLIPPED = enum.auto()


class Event(enum.Enum):
    """What a user calls; the value is how an error names it."""

    BACKWARD = "backward"
    REDUCE = "allreduce_grads"
    UNSCALE = "unscale"
    CLIP = "clip_global_norm"
    UPDATE = "update"


_P, _E = Phase, Event
# Reducing what is reduced changes nothing; clipping reduces first; an update ends the step from anywhere.
_LEGAL: dict[tuple[Phase, Event], Phase] = {
    (_P.READY, _E.BACKWARD): _P.SCALED,
    (_P.SCALED, _E.BACKWARD): _P.SCALED,
    (_P.REDUCED, _E.BACKWARD): _P.SCALED,
    (_P.READY, _E.REDUCE): _P.READY,
    (_P.SCALED, _E.REDUCE): _P.REDUCED,
    (_P.REDUCED, _E.REDUCE): _P.REDUCED,
    (_P.CLIPPED, _E.REDUCE): _P.CLIPPED,
    (_P.UNSCALED, _E.REDUCE): _P.UNSCALED_REDUCED,
    (_P.UNSCALED_REDUCED, _E.REDUCE): _P.UNSCALED_REDUCED,
    (_P.UNSCALED_CLIPPED, _E.REDUCE): _P.UNSCALED_CLIPPED,
    (_P.SCALED, _E.UNSCALE): _P.UNSCALED,
    (_P.REDUCED, _E.UNSCALE): _P.UNSCALED_REDUCED,
    (_P.CLIPPED, _E.UNSCALE): _P.UNSCALED_CLIPPED,
    (_P.SCALED, _E.CLIP): _P.CLIPPED,
    (_P.REDUCED, _E.CLIP): _P.CLIPPED,
    (_P.CLIPPED, _E.CLIP): _P.CLIPPED,
    (_P.UNSCALED, _E.CLIP): _P.UNSCALED_CLIPPED,
    (_P.UNSCALED_REDUCED, _E.CLIP): _P.UNSCALED_CLIPPED,
    (_P.UNSCALED_CLIPPED, _E.CLIP): _P.UNSCALED_CLIPPED,
    **{(phase, _E.UPDATE): _P.READY for phase in Phase if phase is not _P.READY},
}
_TRUE = (_P.UNSCALED, _P.UNSCALED_REDUCED, _P.UNSCALED_CLIPPED)
_SUMMED = (_P.REDUCED, _P.CLIPPED, _P.UNSCALED_REDUCED, _P.UNSCALED_CLIPPED)


class Progress:
    """The phase between two steps.

    Attributes
    ----------
    phase : Phase
    clip : float
        The factor by which clipping shrinks the update.
    accumulates : bool
        Whether a backward adds to the gradients that are there.
    factors : list
        Arrays that losses were multiplied by whose backward has yet to come.
    overflows : Overflows or None
        Which gradients were not finite when they were unscaled.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """No backward has come since the last step."""
        self.phase = Phase.READY
        self.clip = 1.0
        self.accumulates = False
        self.factors: list[Any] = []
        self.overflows: Any = None

    @property
    def reduced(self) -> bool:
        """Whether the gradients are summed over devices and workers."""
        return self.phase in _SUMMED

    @property
    def unscaled(self) -> bool:
        """Whether the gradients are true ones."""
        return self.phase in _TRUE

    def check(self, event: Event, loss_scale: float, *, called: str = "") -> None:
        """Raise ``RuntimeError`` where ``event`` may not happen now.

        ``called``: what the user called, where that is not ``event.value``.
        """
        before = self._before(loss_scale)
        if event is Event.BACKWARD and before is Phase.REDUCED and self.accumulates:
            raise RuntimeError("backward after allreduce_grads() would add to reduced gradients: update first")
        if (before, event) in _LEGAL:
            return
        if event is Event.BACKWARD:
            raise RuntimeError("backward after unscale() or clip_global_norm(): step first, then go on")
        if before is not Phase.READY:
            raise RuntimeError(f"{event.value}() was already called since the last step: the gradients are true ones")
        raise RuntimeError(
            f"{called or event.value}() before a scaled backward: call trainer.backward(loss), or scale_loss(loss), "
            "instead of loss.backward() (an Estimator takes batch_processor=mxmp.BatchProcessor()); unscaled "
            f"gradients would be divided by the loss scale {loss_scale:g}"
        )

    def note(self, event: Event, loss_scale: float) -> None:
        """``event``, which ``check`` let through, has happened."""
        self.phase = _LEGAL[self._before(loss_scale), event]
        if event is Event.UPDATE:
            self.clip = 1.0

    def _before(self, loss_scale: float) -> Phase:
        """At scale 1 the gradients of a plain ``loss.backward()`` are as good as ours."""
        return Phase.SCALED if self.phase is Phase.READY and loss_scale == 1.0 else self.phase
