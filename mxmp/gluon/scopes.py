"""autograd's scopes in the code of a block (``pause``, ``train_mode``, ``predict_mode``), which Symbols do not follow.

MXNet drops them in a trace: what was computed in ``pause`` gets gradients, and Dropout in ``predict_mode`` drops.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd

PAUSED, TRAINING = "__mxmp_paused__", "__mxmp_training__"


class _Marks(dict):
    """Attributes of operators. A copy has the marks of the scope of autograd in which it is made."""

    def __init__(self, attrs: dict[str, str], around: Scopes) -> None:
        super().__init__(attrs)
        self._around = around
        around.made.append(self)

    def __bool__(self) -> bool:
        return True  # MXNet copies no empty ones

    def copy(self) -> dict[str, str]:
        kept = {name: text for name, text in self.items() if name not in (PAUSED, TRAINING)}
        return kept if self._around.is_over else _Marks({**kept, **self._around.marks()}, self._around)

    def remove(self) -> None:
        for name in (PAUSED, TRAINING):
            self.pop(name, None)


def marks_now() -> dict[str, str]:
    """Return the marks that an operator would get that is made now."""
    found = mx.sym.var("operator").list_attr()
    return {name: found[name] for name in (PAUSED, TRAINING) if name in found}


class Scopes(mx.AttrScope):
    """Marks the operators of a trace, in the ``with`` block, whose scope of autograd is another one than around it."""

    def __init__(self) -> None:
        super().__init__()
        # Whether autograd records around the block, and whether an operator has a mark.
        self.recording, self.has_marked = autograd.is_recording(), False
        self._training = autograd.is_training()
        self.made: list[_Marks] = []
        self.is_over = False
        self._is_marking, self._custom = True, mx.sym.Custom

    def __enter__(self) -> Scopes:
        super().__enter__()
        mx.sym.Custom = self._marked_custom
        # MXNet's ``foreach`` has a scope of its own inside, with a copy of these.
        self._attr: dict[str, str] = _Marks(self._attr, self)
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        mx.sym.Custom = self._custom
        # A scope of the user's keeps its attributes, also to enter it again after the trace.
        for each in self.made:
            each.remove()
        self.made.clear()
        self.is_over = True

    def marks(self) -> dict[str, str]:
        """Return the marks of an operator that is made now."""
        if not self._is_marking:
            return {}
        training = autograd.is_training()
        found = {TRAINING: str(int(training))} if training != self._training else {}
        if self.recording and not autograd.is_recording():
            found[PAUSED] = "1"
        self.has_marked |= bool(found)
        return found

    def _marked_custom(self, *args: Any, **kwargs: Any) -> mx.sym.Symbol:
        """Make a custom operator, whose attributes MXNet hands to a class of the user's: its copies have the marks."""
        marks = marks_now()
        before, self._is_marking = self._is_marking, False
        try:
            made = self._custom(*args, **kwargs)
        finally:
            self._is_marking = before
        if not marks:
            return made
        copies = [mx.sym.identity(made[i]) for i in range(len(made.list_outputs()))]
        return copies[0] if len(copies) == 1 else mx.sym.Group(copies)
