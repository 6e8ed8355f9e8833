"""What the code of a graph may call, and what that reads of Python besides attributes of blocks."""

from __future__ import annotations

import dis
from collections import deque
from functools import lru_cache, partial
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import AbstractSet, Any, Callable, Collection, Iterable, Mapping

from mxnet.gluon import Block

from .reads import INSTALLED, Enclosing, is_derived, is_of_library, is_users, is_value

# The code of blocks that MXNet calls.
CALLED = {"__call__", "forward", "hybrid_forward"}


class Reachable:
    """The functions that code may call. ``note`` gets each name that these read, and whose it is: a dict of globals or
    of a function's attributes, its Enclosing, or one of ``classes``, whose own values code reads as
    ``type(self).name``."""

    def __init__(self, classes: Iterable[type], note: Callable[[Any, str], None]) -> None:
        self._note = note
        self._classes = [each for each in classes if not is_of_library(each)]
        # Functions that may be called, the names in their code, and the classes and objects whose methods these may be.
        self._functions: dict[int, FunctionType] = {}
        self._names: set[str] = set()
        self._holders: dict[int, Any] = {}

    def names(self) -> AbstractSet[str]:
        """Return the names of all globals and attributes in the code of these functions, as far as they are known."""
        return self._names

    def reach(self, *values: Any) -> None:
        """Note what the functions that code may call with these values read, and what those read that they name."""
        todo, known = [*values], len(self._names)
        while todo:
            value = todo.pop()
            if isinstance(value, FunctionType):
                todo += self._read_by(value)
            elif isinstance(value, ModuleType):
                self._read_module(value, self._names, todo, set())
            elif id(value) not in self._holders and (parts := _parts(value, self._names)) is not None:
                self._holders[id(value)] = value
                todo += parts
            if not todo and len(self._names) > known:
                known = len(self._names)
                again = [each for each in self._holders.values() if hasattr(each, "__dict__")]
                todo = [part for each in again for part in _parts(each, self._names) or ()]

    def _read_by(self, function: FunctionType) -> list[Any]:
        """Note what a function of the user's reads besides attributes of blocks; return the values."""
        if id(function) in self._functions or is_of_library(function):
            return []
        self._functions[id(function)] = function
        names = _names(function.__code__)
        self._names |= names
        for name in names & vars(function).keys():
            self._note(vars(function), name)
        for kind in self._classes:
            for name in names & vars(kind).keys():
                if is_value(name, vars(kind)[name]):
                    self._note(kind, name)
        enclosing = Enclosing(function)
        for name in enclosing:
            self._note(enclosing, name)
        values = [*enclosing.values(), *(function.__defaults__ or ())]
        for module in [each for each in values if isinstance(each, ModuleType)]:
            self._read_module(module, names, values, set())
        if is_users(function):
            self._read_in(function.__globals__, _globals_in(function.__code__), names, values, set())
        return [*values, *(function.__kwdefaults__ or {}).values()]

    def _read_in(
        self, space: dict, read: AbstractSet[str], names: AbstractSet[str], values: list[Any], seen: set[int]
    ) -> None:
        """Note what code reads of the globals of a module, and code with these names of the modules among them."""
        seen.add(id(space))
        for name in read & space.keys():
            value = space[name]
            if not isinstance(value, ModuleType):
                self._note(space, name)
                values.append(value)
            else:
                self._read_module(value, names, values, seen)

    def _read_module(self, module: ModuleType, names: AbstractSet[str], values: list[Any], seen: set[int]) -> None:
        if _is_users(module) and id(vars(module)) not in seen:
            self._read_in(vars(module), names, names, values, seen)


def of_classes(kind: type, names: Collection[str]) -> list[Any]:
    """Return the attributes with these names of a class and of its bases, which ``super()`` reads."""
    own = [vars(each) for each in kind.__mro__ if not is_of_library(each)]
    return [held[name] for held in own for name in names if name in held]


def _parts(value: Any, names: Collection[str]) -> Iterable[Any] | None:
    """Return what code with these names may call of a value; None if it holds no functions."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    contents: Iterable[Any] = ()
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        contents = value.values() if isinstance(value, Mapping) else value
        if not is_derived(value):
            return contents
    kind = value if isinstance(value, type) else type(value)
    if is_of_library(kind) or isinstance(value, (Block, ModuleType)):
        return None
    held, made = ({}, ()) if value is kind else (getattr(value, "__dict__", {}), ("__init__",))
    spaces = [*(vars(each) for each in kind.__mro__ if not is_of_library(each)), held]
    own = chain.from_iterable(each.items() for each in spaces)
    return [*contents, *(each for name, each in own if name in names or (name[:2] == "__" and name not in made))]


def _is_users(module: ModuleType) -> bool:
    """Return whether a module is neither one of Python's own nor of an installed package."""
    file = getattr(module, "__file__", None)
    return not file.startswith(INSTALLED) if file else module.__spec__ is None


@lru_cache(maxsize=None)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code, and in that of functions inside it."""
    return frozenset(code.co_names).union(*map(_names, _inner(code)))


@lru_cache(maxsize=None)
def _globals_in(code: CodeType) -> frozenset[str]:
    """Return those of ``_names`` that are globals."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME")))
    return frozenset(own).union(*map(_globals_in, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]
