"""What stands in a converted block where MXNet keeps its one graph: constants that answer by the call itself.

``HybridBlock`` compares the structure of a call's inputs with the one that it traced, collects the inputs
of its cached op, calls that, and regroups the outputs::

    if fmt != self._in_format: raise ...
    cargs = [inputs[i] if is_input else i.data() for is_input, i in self._cached_op_args]
    return _regroup(self._cached_op(*cargs), self._out_format)

Here the structure is equal to every other and remembers, in this thread, which one it met; the op gets
all inputs, finds the graph for them, and gives an answer that regrouping hands on untouched. Nothing of
one call is kept on the block, and nothing of a user's runs between these lines, so calls from several
threads, and calls inside calls, do not meet.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable, Sequence

from mxnet.gluon import Parameter

__all__ = ["Active", "Dispatcher", "in_format", "op_args", "out_format"]

_call = threading.local()


class Dispatcher:
    """Stands in the cached op. ``find`` gives the result for flat inputs and their structure.

    ``flags`` are what ``hybridize`` gave, ``graphs`` those made since then, ``shown`` the one that files are
    made of. A copy starts without graphs.
    """

    def __init__(self, find: Callable[[Dispatcher, list, Any], Any], flags: list) -> None:
        self.find = find
        self.flags = flags
        self.graphs: dict = {}
        self.shown: Any = None
        self.monitor: tuple | None = None

    def __call__(self, inputs: list, *_: None) -> Sequence:
        result = self.find(self, inputs, _call.structure)
        _call.answered = True
        return _Answer([result])

    def __getstate__(self) -> dict:
        return {**vars(self), "graphs": {}, "shown": None, "monitor": None}

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self.monitor = (callback, monitor_all)


class _Answer(list):
    """One result, whatever item or slice of it is asked for."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)


class _Structure(list):
    """The structure of the last graph's inputs, for files; to a call, equal to its own."""

    def __ne__(self, structure: object) -> bool:
        _call.structure = structure
        return False

    __hash__ = None  # type: ignore[assignment]


class _Nested(list):
    """The nested structure of the last graph's outputs, for files.

    To the regrouping of an answer it is the number 0, "the first item": in this thread, once, right
    after a ``Dispatcher``.
    """

    @property
    def __class__(self) -> type:
        answered, _call.answered = getattr(_call, "answered", False), False
        return int if answered else type(self)

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("a structure stays one")

    def __lt__(self, _: Any) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other == 0 if type(other) is int else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def in_format(structure: Any) -> Any:
    return _Structure(structure or [])


def out_format(structure: Any) -> Any:
    return _Nested(structure) if isinstance(structure, list) else structure or 0


class _Exported:
    """A parameter as ``export`` asks for it; a call gets nothing from it."""

    def __init__(self, param: Parameter) -> None:
        self._reduce = param._reduce
        self.name = param.name

    def data(self) -> None:
        return None


def op_args(params: Sequence[Parameter]) -> list:
    """The list of all inputs, and names for files."""
    return [(True, slice(None)), *((False, _Exported(param)) for param in params)]


class Active:
    """Stands where MXNet keeps whether a block runs as a graph; ``summary`` is told what the user chose.

    ``summary`` refuses blocks that run as a graph and looks at what their children return. ``asked_by``
    is the thread in which it did last.
    """

    def __init__(self, runs: bool, chosen: bool) -> None:
        self.runs = runs
        self.chosen = chosen
        self.asked_by: int | None = None

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_name != "_register_summary_hook":
            return self.runs
        self.asked_by = None if self.chosen else threading.get_ident()
        return self.chosen
