"""What a Gluon Trainer has done with its gradients since its last step, and which of its methods may be called next."""

from __future__ import annotations

import enum
from typing import Any


class Phase(enum.Enum):
    """What has been done with the gradients of a Gluon Trainer since its last step."""

    READY = enum.auto()  # no scaled backward has run
    SCALED = enum.auto()  # the gradients contain the loss scale; each device has its own
    REDUCED = enum.auto()  # they contain the loss scale, and are summed over devices and workers
    CLIPPED = enum.auto()  # as REDUCED; the update will also multiply them by ``Progress.clip``
    UNSCALED = enum.auto()  # they have been divided by the loss scale; each device has its own
    UNSCALED_REDUCED = enum.auto()  # divided by the loss scale, and summed over devices and workers
    UNSCALED_CLIPPED = enum.auto()  # as UNSCALED_REDUCED; the update will also multiply them by ``Progress.clip``


class Event(enum.Enum):
    """A method of a Gluon Trainer, by its name, that changes the ``Phase`` of its gradients."""

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
    """What a Gluon Trainer has done with its gradients since its last step; refuses method calls in a wrong order."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self.clip = 1.0  # the factor by which the update multiplies the gradients to clip their norm
        # Whether gradients are summed and one has ``grad_req="add"``, so that another backward would add to its sum.
        self.accumulates = False
        # Overflows, from ``unscale()`` until gradients are summed: before, the Trainer writes a NaN into each.
        self.overflows: Any = None
        self.written_by_other = False  # whether a trainer with another scaler ran the last backward

    @property
    def reduced(self) -> bool:
        return self.phase in _SUMMED

    @property
    def unscaled(self) -> bool:
        return self.phase in _TRUE

    def check(self, event: Event, loss_scale: float, *, called: str = "") -> None:
        """Raise ``RuntimeError`` if the user may not call ``event`` now, which the message calls ``called``."""
        before = self._effective_phase(loss_scale)
        if event is Event.BACKWARD and before is Phase.REDUCED and self.accumulates:
            raise RuntimeError("backward after allreduce_grads() would add to reduced gradients: update first")
        if before in _AFTER[event]:
            return
        if event is Event.BACKWARD:
            raise RuntimeError("backward after unscale() or clip_global_norm(): step first, then continue")
        if before is not Phase.READY:
            raise RuntimeError(f"{event.value}() was already called since the last step: the gradients are true ones")
        if self.written_by_other:
            raise RuntimeError(
                f"{called or event.value}() before a scaled backward of this trainer: another mxmp.Trainer's backward "
                "has written its gradients, with another loss scale. Give all trainers of one loss the same scaler "
                "object (scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for all; or, "
                "for a loss of its own, call trainer.backward(loss) of this trainer"
            )
        raise RuntimeError(
            f"{called or event.value}() before a scaled backward: call trainer.backward(loss), or scale_loss(loss), "
            "instead of loss.backward() (an Estimator takes batch_processor=mxmp.BatchProcessor()); unscaled "
            f"gradients would be divided by the loss scale {loss_scale:g}"
        )

    def note(self, event: Event, loss_scale: float) -> None:
        """Set ``phase`` to the one after ``event``, which ``check`` has permitted."""
        self.phase = _AFTER[event][self._effective_phase(loss_scale)]
        self.written_by_other = False

    def _effective_phase(self, loss_scale: float) -> Phase:
        # A plain ``loss.backward()``, which the Trainer does not notice, has the same gradients at a loss scale of 1.
        return Phase.SCALED if self.phase is Phase.READY and loss_scale == 1.0 else self.phase
