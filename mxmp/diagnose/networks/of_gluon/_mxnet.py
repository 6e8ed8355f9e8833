"""The private attributes of MXNet's blocks and Parameters that diagnostics alone use."""

from __future__ import annotations

import threading
from typing import Any, Callable

from mxnet.gluon import HybridBlock, Parameter, Trainer

from ....gluon._mxnet import copied, forward, overrides_forward


def set_monitor(block: HybridBlock, monitor: tuple | None) -> None:
    """Set the op hook ``(callback, monitor_all)`` of ``block`` alone; None removes it."""
    block._callback, block._monitor_all = monitor or (None, False)


def graph_arguments(block: HybridBlock, args: tuple) -> tuple | None:
    """Return the arguments that the graph of ``block`` would get in ``block(*args)``; None if no graph would run."""
    # An overriding ``forward`` may call ``HybridBlock.forward`` with other arguments. It runs on a copy, and is stopped
    # where it would run the graph; operators and child blocks before that really run.
    if not overrides_forward(block):
        return args
    clone = copied(block)

    def note(*given: Any) -> None:
        raise _GraphCalledError(given)

    clone._active = True
    clone.__dict__["_call_cached_op"] = note
    try:
        forward(clone, args)
    except _GraphCalledError as call:
        return call.args[0]
    return None


class _GraphCalledError(Exception):
    """Stops the ``forward`` that ``graph_arguments`` runs; ``args[0]`` has the arguments that the graph would get."""


# -- in a process of ``verify``, which does nothing else and ends -------------------------------------


def after_initial_values(call: Callable[[Parameter, bool], None]) -> None:
    """Let ``call(parameter, drawn)`` follow wherever a Parameter gets values: drawn ones, or others (``set_data``).
    Changes MXNet's class, for a process that does nothing else and ends."""
    finish, load, set_data = Parameter._finish_deferred_init, Parameter._load_init, Parameter.set_data
    busy = threading.local()

    def followed(original: Callable, drawn: bool) -> Callable:
        def method(self: Parameter, *args: Any, **kwargs: Any) -> Any:
            nested, busy.now = getattr(busy, "now", False), True
            before = self._data
            try:
                found = original(self, *args, **kwargs)
                if not nested and self._data is not None and not (drawn and self._data is before):
                    call(self, drawn)
            finally:
                busy.now = nested
            return found

        return method

    Parameter._finish_deferred_init = followed(finish, True)
    Parameter._load_init = followed(load, False)
    Parameter.set_data = followed(set_data, False)


def around_updates(call: Callable[[Trainer, float, Callable[[], None]], None]) -> None:
    """Let ``call(trainer, factor, update)`` run each update of a gluon.Trainer, which multiplies gradients by
    ``factor``; for such a process, too."""
    original = Trainer._update

    def followed(self: Trainer, ignore_stale_grad: bool = False) -> None:
        call(self, self._optimizer.rescale_grad, lambda: original(self, ignore_stale_grad))

    Trainer._update = followed


def never_hybridize() -> None:
    """Let ``hybridize`` do nothing, so that all blocks run as Python code; for such a process, too."""
    hybridize = HybridBlock.hybridize
    HybridBlock.hybridize = lambda self, active=True, *args, **kwargs: hybridize(self, False)


def export_if_possible() -> None:
    """Let ``export`` of a block that is not hybridized write nothing, as only mxmp's graphs could be written."""
    export = HybridBlock.export

    def exported(self: HybridBlock, *args: Any, **kwargs: Any) -> Any:
        return export(self, *args, **kwargs) if self._cached_graph else (None, None)

    HybridBlock.export = exported
