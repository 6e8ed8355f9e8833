"""A warning where user code reads a gradient that contains the loss scale: between a scaled backward and its step.

Meanwhile the Parameters have a ``grad`` and a ``list_grad`` of their own. ``param._grad`` and ``param.data().grad`` are
not seen: MXNet compares the class of an array by identity, so an array must keep it.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, Callable, Iterable

from mxnet.gluon import Parameter

from ..step._mxnet import is_called_by_user

_METHODS = ("grad", "list_grad")


class _Read:
    """The method ``name`` of a Parameter with scaled gradients: warns, and calls that of its class."""

    def __init__(self, param: Parameter, name: str, warn: Callable[[Parameter], None]) -> None:
        self._param, self._name, self._warn = weakref.ref(param), name, warn

    def __call__(self, *args: Any, **named: Any) -> Any:
        param: Any = self._param()
        if is_called_by_user():
            self._warn(param)
        return getattr(type(param), self._name)(param, *args, **named)

    def __reduce__(self) -> tuple:
        """Return how to copy it: as the method of the copied Parameter's class."""
        return _method, (self._param(), self._name)


def _method(param: Parameter, name: str) -> Any:
    return MethodType(getattr(type(param), name), param)


def _warner(trainer: Any) -> Callable[[Parameter], None]:
    """Return the trainer's ``warn_of_scaled_gradients``, without keeping the trainer alive."""
    method = weakref.WeakMethod(trainer.warn_of_scaled_gradients)

    def warn(param: Parameter) -> None:
        found = method()
        if found is not None:
            found(param)

    return warn


def warn_of_reads(params: Iterable[Parameter], trainer: Any) -> None:
    """Let user code that reads gradients of ``params`` get one warning of ``trainer``, until ``stop_warning``."""
    warn = _warner(trainer)
    for param in params:
        own = vars(param)
        for name in _METHODS:
            if name not in own or isinstance(own[name], _Read):  # a user may have set one
                own[name] = _Read(param, name, warn)


def stop_warning(params: Iterable[Parameter]) -> None:
    for param in params:
        for name in _METHODS:
            if isinstance(vars(param).get(name), _Read):
                del vars(param)[name]
