"""Steps that share one scaler object: the scale is frozen until each has stepped, and adjusts once."""

from __future__ import annotations

import weakref
from typing import Any

from .scaler import Scaler

__all__ = ["ScalerGroup", "group_of"]


class ScalerGroup:
    """Who shares a scaler, and who of them has not stepped since the last backward."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = weakref.proxy(scaler)
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._finite = True

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward: that of the last one until all have stepped, then the scaler's."""
        return next((member.scaled_by for member in self._waiting), self._scaler.loss_scale)

    def join(self, member: Any) -> None:
        self._members.add(member)

    def note_backward(self) -> None:
        """A backward that serves all members."""
        scale = self.loss_scale
        self._waiting = weakref.WeakSet(self._members)
        for member in self._waiting:
            member.scaled_by = scale

    def note_step(self, member: Any, finite: bool) -> None:
        """``member`` has stepped. The last one adjusts the scale: an overflow of any is an overflow."""
        self._finite = self._finite and finite
        self._done(member)
        if not self._waiting:
            self._scaler.adjust(self._finite)
            self._finite = True

    def forget_backward(self, member: Any) -> None:
        """The gradients of ``member`` are gone, and it will not step."""
        self._done(member)
        if not self._waiting:
            self._finite = True

    def _done(self, member: Any) -> None:
        member.scaled_by = None
        self._waiting.discard(member)


# Global: the group of each scaler that lives. Trainers share one by being passed the same object, which may be a
# user's own class, so it is not stored there.
_groups: weakref.WeakKeyDictionary[Scaler, ScalerGroup] = weakref.WeakKeyDictionary()


def group_of(scaler: Scaler) -> ScalerGroup:
    """The one group of this scaler object."""
    return _groups.setdefault(scaler, ScalerGroup(scaler))
