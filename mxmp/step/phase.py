"""The phase of a trainer between two steps, and what it may do there.

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
    """A call by the user; the value is its name in errors."""

    BACKWARD = "backward"
    REDUCE = "allreduce_grads"
    UNSCALE = "unscale"
    CLIP = "clip_global_norm"
    UPDATE = "update"


_SCALED = (Phase.SCALED, Phase.REDUCED, Phase.CLIPPED)
_TRUE = (Phase.UNSCALED, Phase.UNSCALED_REDUCED, Phase.UNSCALED_CLIPPED)
_SUMMED = (*_SCALED[1:], *_TRUE[1:])
# The phase after each event, by the phase before it. An event that is missing there is refused.
_AFTER: dict[Event, dict[Phase, Phase]] = {
    Event.BACKWARD: dict.fromkeys((Phase.READY, Phase.SCALED, Phase.REDUCED), Phase.SCALED),
    Event.REDUCE: {  # nothing changes where they are reduced already
        **{phase: phase for phase in Phase},
        Phase.SCALED: Phase.REDUCED,
        Phase.UNSCALED: Phase.UNSCALED_REDUCED,
    },
    Event.UNSCALE: dict(zip(_SCALED, _TRUE)),
    Event.CLIP: {  # which reduces first
        **dict.fromkeys(_SCALED, Phase.CLIPPED),
        **dict.fromkeys(_TRUE, Phase.UNSCALED_CLIPPED),
    },
    Event.UPDATE: dict.fromkeys((*_SCALED, *_TRUE), Phase.READY),
}


class Progress:
    """The state of a trainer between two steps."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self.clip = 1.0  # the factor by which clipping shrinks the update
        self.accumulates = False  # whether a backward adds to existing gradients
        self.factors: list[Any] = []  # arrays that losses were multiplied by whose backward has yet to come
        self.overflows: Any = None  # Overflows: the gradients that were not finite when they were unscaled

    @property
    def reduced(self) -> bool:
        """Return whether the gradients are summed over devices and workers."""
        return self.phase in _SUMMED

    @property
    def unscaled(self) -> bool:
        """Return whether the gradients are true ones."""
        return self.phase in _TRUE

    def check(self, event: Event, loss_scale: float, *, called: str = "") -> None:
        """Raise ``RuntimeError`` if ``event`` may not happen now.

        ``called``: what the user called, if that is not ``event.value``.
        """
        before = self._effective_phase(loss_scale)
        if event is Event.BACKWARD and before is Phase.REDUCED and self.accumulates:
            raise RuntimeError("backward after allreduce_grads() would add to reduced gradients: update first")
        if before in _AFTER[event]:
            return
        if event is Event.BACKWARD:
            raise RuntimeError("backward after unscale() or clip_global_norm(): step first, then continue")
        if before is not Phase.READY:
            raise RuntimeError(f"{event.value}() was already called since the last step: the gradients are true ones")
        raise RuntimeError(
            f"{called or event.value}() before a scaled backward: call trainer.backward(loss), or scale_loss(loss), "
            "instead of loss.backward() (an Estimator takes batch_processor=mxmp.BatchProcessor()); unscaled "
            f"gradients would be divided by the loss scale {loss_scale:g}"
        )

    def note(self, event: Event, loss_scale: float) -> None:
        """Note that ``event``, which ``check`` permitted, has happened."""
        self.phase = _AFTER[event][self._effective_phase(loss_scale)]
        if event is Event.UPDATE:
            self.clip = 1.0

    def _effective_phase(self, loss_scale: float) -> Phase:
        """Return the phase; at scale 1 the gradients of MXNet's own ``loss.backward()`` are as good as ours."""
        return Phase.SCALED if self.phase is Phase.READY and loss_scale == 1.0 else self.phase
