"""The phase of a trainer between two steps, and what it may do there.

====================  ============  ================================================================
phase                 the gradients are
====================  ============  ================================================================
``READY``             of no scaled backward
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
    """What has happened to the gradients of a Gluon Trainer since its last step, in the order in which a step goes.

    ``READY``: no scaled backward has run. ``SCALED``: the gradients contain the loss scale, and each device has its
    own. ``REDUCED``: they are summed over devices and workers as well. ``CLIPPED``: ``clip_global_norm`` has chosen a
    factor for the update as well. The three ``UNSCALED`` phases are the same after ``unscale()`` has divided by the
    loss scale.
    """

    READY = enum.auto()
    SCALED = enum.auto()
    REDUCED = enum.auto()
    CLIPPED = enum.auto()
    UNSCALED = enum.auto()
    UNSCALED_REDUCED = enum.auto()
    UNSCALED_CLIPPED = enum.auto()


class Event(enum.Enum):
    """A method of the Trainer that changes its phase.

    The value is the method's name: ``Event.REDUCE.value`` is ``"allreduce_grads"``.
    """

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
    Event.REDUCE: {  # changes nothing where gradients are summed already
        **{phase: phase for phase in Phase},
        Phase.SCALED: Phase.REDUCED,
        Phase.UNSCALED: Phase.UNSCALED_REDUCED,
    },
    Event.UNSCALE: dict(zip(_SCALED, _TRUE)),
    Event.CLIP: {  # the method sums gradients first
        **dict.fromkeys(_SCALED, Phase.CLIPPED),
        **dict.fromkeys(_TRUE, Phase.UNSCALED_CLIPPED),
    },
    Event.UPDATE: dict.fromkeys((*_SCALED, *_TRUE), Phase.READY),
}


class Progress:
    """What a Gluon Trainer has done since its last step; refuses calls in a wrong order.

    After each step the Trainer makes a new one.

    Attributes
    ----------
    phase : Phase
        What has happened to the gradients.
    clip : float
        The factor by which the update multiplies the gradients to clip their global norm; 1 without clipping.
    accumulates : bool
        Whether a parameter has ``grad_req="add"``, so that another backward would add to gradients that are summed over
        devices already. Set when the gradients are reduced.
    factors : list of NDArray
        Loss scales, as arrays with a gradient, by which ``scale_loss`` multiplied losses whose backward may run later.
    overflows : Overflows or None
        The gradients that were not finite when ``unscale()`` was called.
    """

    def __init__(self) -> None:
        self.phase = Phase.READY
        self.clip = 1.0
        self.accumulates = False
        self.factors: list[Any] = []
        self.overflows: Any = None

    @property
    def reduced(self) -> bool:
        """Return whether the gradients are summed over devices and workers."""
        return self.phase in _SUMMED

    @property
    def unscaled(self) -> bool:
        """Return whether the loss scale has been divided out of the gradients."""
        return self.phase in _TRUE

    def check(self, event: Event, loss_scale: float, *, called: str = "") -> None:
        """Raise ``RuntimeError`` if the user may not call the method ``event`` in the present phase.

        ``unscale()`` before a backward is such a call, or a second ``unscale()``. At a ``loss_scale`` of 1 gradients of
        ``loss.backward()`` are as good as those of ``trainer.backward(loss)``. ``called`` is the method's name in the
        message, if it is not ``event.value``: ``step`` checks ``Event.UPDATE``.
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
        """Set ``phase`` to the one that follows ``event``, a method that ``check`` permitted and that has run.

        ``loss_scale`` is the same as in ``check``.
        """
        self.phase = _AFTER[event][self._effective_phase(loss_scale)]
        if event is Event.UPDATE:
            self.clip = 1.0

    def _effective_phase(self, loss_scale: float) -> Phase:
        """Return the present phase, or ``SCALED`` in place of ``READY`` at a ``loss_scale`` of 1.

        The gradients of a ``loss.backward()`` of which the Trainer does not know are correct at that scale.
        """
        return Phase.SCALED if self.phase is Phase.READY and loss_scale == 1.0 else self.phase
