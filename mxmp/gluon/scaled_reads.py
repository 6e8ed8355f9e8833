"""A warning where user code reads a gradient that contains the loss scale: between a scaled backward and its step.

Meanwhile the Parameters have a ``grad`` and a ``list_grad`` of their own. ``param._grad`` and ``param.data().grad`` are
not seen: MXNet compares the class of an array by identity, so an array must keep it.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, Iterable

from mxnet.gluon import Parameter

from ..messages import is_called_by_user

_METHODS = ("grad", "list_grad")


class _Read:
    """The method ``name`` of a Parameter with scaled gradients: lets the trainer warn, and calls that of its class."""

    def __init__(self, param: Parameter, name: str, trainer: Any) -> None:
        self._param, self._name, self._trainer = weakref.ref(param), name, weakref.ref(trainer)

    def __call__(self, *args: Any, **named: Any) -> Any:
        param: Any = self._param()
        trainer = self._trainer()
        if is_called_by_user() and trainer is not None:
            trainer.warn_of_scaled_gradients(param)
        return getattr(type(param), self._name)(param, *args, **named)

    def __reduce__(self) -> tuple:
        """Return how to copy it: as the method of the copied Parameter's class."""
        return _method, (self._param(), self._name)


def _method(param: Parameter, name: str) -> Any:
    return MethodType(getattr(type(param), name), param)


def warn_of_reads(params: Iterable[Parameter], trainer: Any) -> None:
    """Let user code that reads gradients of ``params`` get one warning of ``trainer``, until ``stop_warning``."""
    for param in params:
        own = vars(param)
        for name in _METHODS:
            if name not in own or isinstance(own[name], _Read):  # a user may have set one
                own[name] = _Read(param, name, trainer)


def stop_warning(params: Iterable[Parameter]) -> None:
    for param in params:
        own = vars(param)
        for name in _METHODS:
            if name in own and isinstance(own[name], _Read):
                del own[name]
