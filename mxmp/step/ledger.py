"""The ledger of a trainer's gradients: which there are, at which loss scale, and whether they are summed over devices
and workers, unscaled or clipped; and the group of trainers that share a scaler, whose ledgers say when it is adjusted.
"""

from __future__ import annotations

import enum
import weakref
from typing import AbstractSet, Any, Iterable

from .scaler import Scaler


class Event(enum.Enum):
    """A method of a Gluon Trainer, by its name, that changes what its ledger says."""

    BACKWARD = "backward"
    REDUCE = "allreduce_grads"
    UNSCALE = "unscale"
    CLIP = "clip_global_norm"
    UPDATE = "update"


class State(enum.Enum):
    """What the gradients of a trainer are, between two steps."""

    NONE = "none to apply"
    SCALED = "as a backward wrote them"
    REDUCED = "summed over devices and workers"
    CLIPPED = "summed, with a factor that clips them"
    UNSCALED = "true ones, of each device"
    UNSCALED_REDUCED = "true ones, summed"
    UNSCALED_CLIPPED = "true ones, summed, with a factor that clips them"


# What an event makes of them; one that is not here is refused. An update leads to NONE, from every other state.
LEADS_TO = {
    State.NONE: {Event.BACKWARD: State.SCALED, Event.REDUCE: State.NONE},
    State.SCALED: {
        Event.BACKWARD: State.SCALED,
        Event.REDUCE: State.REDUCED,
        Event.UNSCALE: State.UNSCALED,
        Event.CLIP: State.CLIPPED,
        Event.UPDATE: State.NONE,
    },
    State.REDUCED: {
        Event.BACKWARD: State.SCALED,
        Event.REDUCE: State.REDUCED,
        Event.UNSCALE: State.UNSCALED_REDUCED,
        Event.CLIP: State.CLIPPED,
        Event.UPDATE: State.NONE,
    },
    State.CLIPPED: {
        Event.REDUCE: State.CLIPPED,
        Event.UNSCALE: State.UNSCALED_CLIPPED,
        Event.CLIP: State.CLIPPED,
        Event.UPDATE: State.NONE,
    },
    State.UNSCALED: {
        Event.REDUCE: State.UNSCALED_REDUCED,
        Event.CLIP: State.UNSCALED_CLIPPED,
        Event.UPDATE: State.NONE,
    },
    State.UNSCALED_REDUCED: {
        Event.REDUCE: State.UNSCALED_REDUCED,
        Event.CLIP: State.UNSCALED_CLIPPED,
        Event.UPDATE: State.NONE,
    },
    State.UNSCALED_CLIPPED: {
        Event.REDUCE: State.UNSCALED_CLIPPED,
        Event.CLIP: State.UNSCALED_CLIPPED,
        Event.UPDATE: State.NONE,
    },
}
_ON_EACH_DEVICE = (State.NONE, State.SCALED, State.UNSCALED)
_UNSCALED = (State.UNSCALED, State.UNSCALED_REDUCED, State.UNSCALED_CLIPPED)


class Ledger:
    """What a trainer or module knows of its gradients since its last step; refuses method calls in a wrong order."""

    def __init__(self) -> None:
        self.scale = 1.0  # the loss scale of the last scaled backward; stays after the step
        # The loss scale in what a step has left in gradients of ``grad_req="add"``, over the factor of clipping.
        self.left = 1.0
        self.clear()

    def __reduce__(self) -> tuple:
        return Ledger, ()  # no backward has written the gradients of a copy

    def clear(self) -> None:
        """Note that no gradient is there to apply: they were applied or skipped, or are dropped."""
        self.state = State.NONE
        self.scaled = False  # whether ``scale`` is in the gradients, and not 1 as in those of a plain backward
        self.awaited = False  # whether the scaler is adjusted only after their step
        self.inputs_overflowed = False  # whether a user has seen an inf or NaN in the gradient of an input
        self.clip = 1.0  # the factor by which the update multiplies the gradients to clip their norm
        # Whether gradients are summed and one has ``grad_req="add"``, so that another backward would add to its sum.
        self.accumulates = False
        # Overflows, from ``unscale()`` until gradients are summed: before, the Trainer writes a NaN into each.
        self.overflows: Any = None
        # Those that are in the sums by now. A discard writes them again, as a user may have set the sums to zero.
        self.put_back: Any = None
        # If a trainer with another scaler ran the last backward, its loss scale.
        self.scale_of_other: float | None = None
        # By the ``id`` of a weight's array: that array and the gradient that it knows. A new ``grad_req`` makes others.
        self.written: dict[int, tuple[Any, Any]] = {}

    @property
    def pending(self) -> bool:
        """Whether a backward has run whose gradients no step has applied."""
        return self.state is not State.NONE

    @property
    def summed(self) -> bool:
        return self.state not in _ON_EACH_DEVICE

    @property
    def unscaled(self) -> bool:
        return self.state in _UNSCALED

    @property
    def is_used_up(self) -> bool:
        """Whether a step has applied or skipped the gradients of the last backward; False without a backward, as in a
        module that applies the gradients of another one."""
        return not self.scaled and self.scale != 1.0

    def note_scale(self, scale: float, *, awaited: bool) -> None:
        self.scale, self.scaled, self.awaited = scale, True, awaited

    def note_written(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Record the arrays of weights whose gradients, the second of a pair, a backward of this ledger has written."""
        self.written.update((id(pair[0]), pair) for pair in pairs)

    def has_written(self, weight: Any, gradient: Any) -> bool:
        return id(weight) in self.written and self.written[id(weight)][1] is gradient

    def use_up(self, weights: AbstractSet[int]) -> None:
        """Record that a trainer has applied or skipped the gradients of these arrays, by ``id``: no later step does."""
        for weight in self.written.keys() & weights:
            del self.written[weight]

    @property
    def refuses_backward(self) -> bool:
        return Event.BACKWARD not in LEADS_TO[self.state] or (self.summed and self.accumulates)

    def check(self, event: Event, loss_scale: float, *, called: str = "", fresh: bool = True) -> None:
        """Raise ``RuntimeError`` if the user may not call ``event`` now, which the message calls ``called``.
        ``fresh``: a plain ``loss.backward()`` may have written gradients."""
        if event is Event.BACKWARD:
            if self.refuses_backward:
                raise RuntimeError(f"{self._step_first()}, or trainer.discard() to leave this step out")
        elif self.pending and event not in LEADS_TO[self.state]:
            raise RuntimeError(f"{event.value}() was already called since the last step: the gradients are true ones")
        elif event is not Event.REDUCE and not self._has_some(loss_scale, fresh):
            name = called or event.value
            if self.scale_of_other is not None:
                raise RuntimeError(
                    f"{name}() before a scaled backward of this trainer: another mxmp.Trainer's backward has written "
                    "its gradients, with another loss scale. Give all trainers of one loss the same scaler object "
                    "(scaler = mxmp.DynamicLossScaler(); loss_scale=scaler), and call backward once for all; or, for "
                    "a loss of its own, call trainer.backward(loss) of this trainer"
                )
            if loss_scale == 1.0:
                return
            raise RuntimeError(
                f"{name}() before a scaled backward: call trainer.backward(loss), or scale_loss(loss), instead of "
                "loss.backward() (an Estimator takes batch_processor=mxmp.BatchProcessor()); unscaled gradients would "
                f"be divided by the loss scale {loss_scale:g}"
            )

    def _step_first(self) -> str:
        if Event.BACKWARD in LEADS_TO[self.state]:
            return "backward after allreduce_grads() would add to reduced gradients: update first"
        return "backward after unscale() or clip_global_norm(): step first, then continue"

    def note(self, event: Event, loss_scale: float) -> None:
        """Record ``event``, which ``check`` has permitted."""
        if event is Event.BACKWARD:
            self.scale_of_other = None
        if not self.pending and loss_scale == 1.0:
            self.state = State.SCALED  # a plain ``loss.backward()``, which the Trainer does not notice, may have run
        self.state = LEADS_TO[self.state].get(event, self.state)

    def _has_some(self, loss_scale: float, fresh: bool) -> bool:
        if loss_scale != 1.0:
            return self.pending
        return fresh or (self.pending and bool(self.written))


class ScalerGroup:
    """The trainers, as their ScaledSteps, that have the same scaler object, which is adjusted once for all of them.
    The gradients of one Gluon backward contain one loss scale, which stays until all members that it reached have
    stepped; the last of these steps adjusts the scaler. A Module's backward reaches that Module only."""

    def __init__(self, scaler: Scaler) -> None:
        # Weak references only, to scaler and members.
        self._scaler = weakref.proxy(scaler)
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._finite: bool | None = None  # whether all steps since the last backward were; None before the first

    def _awaited(self) -> list[Ledger]:
        return [member.ledger for member in self.members if member.ledger.awaited]

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the last Gluon backward while a member must still step, else the scaler's."""
        return next((ledger.scale for ledger in self._awaited()), self._scaler.loss_scale)

    def note_backward(self, reached: Iterable[Any]) -> None:
        """Record a Gluon backward that writes the gradients of the members in ``reached``: they must step."""
        scale = self.loss_scale
        for member in reached:
            member.ledger.note_scale(scale, awaited=True)

    def note_step(self, member: Any, finite: bool) -> None:
        """Record a step. If no other member must still step, adjust the scaler: with False if any had an overflow."""
        self._finite = finite and self._finite is not False
        self._end(member)

    def note_discard(self, member: Any, finite: bool) -> None:
        """Record that ``member`` makes no step. Only an overflow adjusts the scaler, or the steps of other members."""
        if not finite:
            self._finite = False
        self._end(member)

    def _end(self, member: Any) -> None:
        member.ledger.scaled = member.ledger.awaited = False
        if not self._awaited() and self._finite is not None:
            finite, self._finite = self._finite, None
            self._scaler.adjust(finite)

    def forget_backward(self, member: Any) -> None:
        """Record that ``member`` has loaded states, and no gradients to apply; a loaded scaler stays as it is."""
        member.ledger.clear()
        if not self._awaited():
            self._finite = None


# Global: the group of each scaler that exists, by ``id(scaler)``. Trainers share one by being passed the same object,
# which may be of a user's own class and equal to another one: so the group is not stored there, and it is no key.
_groups: dict[int, tuple[weakref.ref[Scaler], ScalerGroup]] = {}


def group_of(scaler: Scaler) -> ScalerGroup:
    """Return the group of all trainers that have this very scaler object; the first call makes it."""
    key = id(scaler)
    if key not in _groups:
        _groups[key] = weakref.ref(scaler, lambda _: _groups.pop(key, None)), ScalerGroup(scaler)
    return _groups[key][1]
