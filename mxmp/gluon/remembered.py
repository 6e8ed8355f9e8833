"""What a graph remembers of Python: what the trace has read, compared at each call, and what it has left behind.

The code of a block runs in the trace alone. What it reads then (attributes, children, globals) must be the same in each
call of the graph; what it writes, such as a second result in an attribute, is written again after each call.
"""

from __future__ import annotations

import copy
import dis
import os
import random
import threading
from array import array
from collections import abc, deque
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import AbstractSet, Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter
from mxnet.ndarray import NDArray

from ..messages.callers import warn_user
from . import _mxnet
from .nesting import Nesting, is_constant, nesting_of

# Global: the trace that runs on this thread, if any, for the blocks that note what is read of them.
_local = threading.local()
_MISSING = object()
# How deep values are compared, in containers and objects inside each other; what is deeper, by identity.
_DEPTH = 6
# Names by which code reads the values of arrays, as no Symbol lets it.
_VALUES = {"asscalar", "asnumpy"}
_NOTING = "_mxmp_noting"
# The code of blocks that MXNet calls.
_CALLED = {"__call__", "forward", "hybrid_forward"}
_LIBRARIES = {
    *("mxnet", "mxmp", "numpy", "builtins", "threading", "_thread", "logging", "enum", "abc", "typing", "weakref"),
}
_NO_ARRAY = "within F.contrib.foreach, while_loop or cond a graph has no array for it"
_INSTALLED = os.path.dirname(os.__file__)


class _Same:
    """An object that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Places:
    """Where values are, to see quickly whether each is still the same object."""

    def __init__(self) -> None:
        # Blocks and globals, and the names that are read of each.
        self._owners: list[tuple[Any, list[str]]] = []
        # Containers whose values are compared by identity, and dicts of which only matters whether they are empty.
        self._containers: list[Any] = []
        self._dicts: list[dict] = []
        # What functions return, compared by ``==``.
        self._contents: list[tuple[Callable[[], Any], Any]] = []
        self._saved: tuple | None = None

    def add_owner(self, owner: Any, names: list[str]) -> None:
        self._owners.append((owner, names))
        of_class = [name for name in names if name not in _held_by(owner)]
        if of_class and not isinstance(owner, dict):
            self.add(_Live(lambda: [_of_class(owner, name) for name in of_class]))

    def add(self, container: Any) -> None:
        """Compare the values in a list, a set, a view of a dict, or a ``_Live``."""
        self._containers.append(container)

    def add_emptiness(self, value: dict) -> bool:
        self._dicts.append(value)
        return bool(value)

    def add_content(self, read: Callable[[], Any]) -> Any:
        self._contents.append((read, read()))
        return self._contents[-1][1]

    def save(self) -> None:
        """Take what is in all places now as that to compare with."""
        self._saved = self._lengths(), list(map(bool, self._dicts)), tuple(self._values())

    def hold(self) -> bool:
        # Runs in every call, for some thousand values, so it loops in C.
        if self._saved is None:
            return False
        lengths, emptiness, values = self._saved
        return (
            self._lengths() == lengths
            and list(map(bool, self._dicts)) == emptiness
            and all(map(is_, self._values(), values))
            and all(read() == saved for read, saved in self._contents)
        )

    def _lengths(self) -> list[int]:
        return list(map(len, self._containers))

    def _values(self) -> Iterator[Any]:
        held = (map(_held_by(owner).get, names, repeat(_MISSING)) for owner, names in self._owners)
        return chain(chain.from_iterable(held), chain.from_iterable(self._containers))


class _Live:
    """What a function returns at the time, as a container."""

    def __init__(self, read: Callable[[], Collection]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def _token(value: Any, places: _Places, depth: int = _DEPTH) -> Any:
    """Return what equals the token of another value if code that makes a graph reads the same from both."""
    if isinstance(value, type):
        return _Same(value), _token_of_class(value, places, depth)
    if value is None or is_constant(value):
        return type(value), repr(value)
    if isinstance(value, (NDArray, mx.sym.Symbol)):
        return NDArray  # whose values no trace reads, but by ``_VALUES``
    if isinstance(value, np.ndarray):
        return places.add_content(lambda: (value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, (random.Random, np.random.RandomState, np.random.Generator)):
        return _Same(value), _state_of(value)
    if depth == 0 or isinstance(value, (Block, Parameter, ModuleType, BuiltinFunctionType)):
        return _Same(value)
    inside = partial(_token, places=places, depth=depth - 1)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        if not isinstance(value, tuple):
            places.add(value)
        return type(value), tuple(map(inside, value))
    if isinstance(value, (bytearray, array)):
        return type(value), places.add_content(lambda: bytes(value))
    if isinstance(value, abc.Iterator):
        return _Same(object())  # to read it is to change it
    if isinstance(value, Mapping):
        for read in (value.keys, value.values):
            places.add(read() if isinstance(value, dict) else _Live(read))
        return type(value), tuple((_key(key), inside(each)) for key, each in value.items())
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell is not None]
        places.add(_Live(lambda: [_content(cell) for cell in cells]))
        return _Same(value), tuple(inside(_content(cell)) for cell in cells), inside(vars(value))
    if isinstance(value, MethodType):
        return inside(value.__func__), inside(value.__self__)
    if isinstance(value, partial):
        return inside(value.func), inside(value.args), inside(value.keywords)
    if _is_of_library(type(value)):
        rates = [name for name in ("learning_rate", "base_lr") if hasattr(value, name)]  # of Trainers and schedules
        return _Same(value), [places.add_content(partial(getattr, value, name)) for name in rates]
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    held = _Live(lambda: [getattr(value, name, _MISSING) for name in slots])
    if slots:
        places.add(held)
    if hasattr(value, "__dict__") or slots:
        return inside(type(value)), inside(getattr(value, "__dict__", {})), tuple(map(inside, held))
    return _Same(value)


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    return [name for name in ([found] if isinstance(found, str) else found) if name[:2] != "__"]


def _token_of_class(kind: type, places: _Places, depth: int) -> Any:
    """Return what equals the token of the class at another time if no value in it, or in its bases, has changed."""
    if depth == 0 or _is_of_library(kind) or issubclass(kind, Block):  # blocks say what is read of their classes
        return ()
    for each in kind.__mro__:
        if not _is_of_library(each):
            places.add(vars(each).values())
    return tuple((name, _token(value, places, depth - 1)) for name, value in _values_in(kind).items())


def _values_in(kind: type) -> dict[str, Any]:
    """Return the values of a class of the user's that are no methods, and the like, by name."""
    own = [vars(each) for each in reversed(kind.__mro__) if not _is_of_library(each)]
    held = {name: value for each in own for name, value in each.items()}
    return {name: value for name, value in held.items() if name[:2] != "__" and not hasattr(type(value), "__get__")}


def _key(key: Any) -> Any:
    return (type(key), repr(key)) if is_constant(key) else _Same(key)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _is_of_library(kind: Any) -> bool:
    return (kind.__module__ or "").partition(".")[0] in _LIBRARIES


def _is_users(module: ModuleType) -> bool:
    """Return whether a module is neither one of Python's own nor of an installed package."""
    file = getattr(module, "__file__", None)
    return not file.startswith(_INSTALLED) if file else module.__spec__ is None


class Reads:
    """What the code of one graph has read of Python, by owner (a block, or the globals of a function) and name."""

    def __init__(self) -> None:
        # Why the graph is right for no other call, if so.
        self.always_anew: str | None = None
        self._read: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._places = _Places()

    def hold(self) -> bool:
        """Return whether a trace would read the same now."""
        if self.always_anew:
            return False
        if self._places.hold():
            return True
        return self.changed() is None

    def changed(self) -> str | None:
        """Return the name of what a trace would read another value of now, such as ``"net0.tau"``."""
        places = _Places()
        names: dict[int, tuple[Any, list[str]]] = {}
        for owner, name, token in self._read.values():
            if _token_of(owner, name, places) != token:
                return f"{owner.name}.{name}" if isinstance(owner, Block) else name
            names.setdefault(id(owner), (owner, []))[1].append(name)
        for owner, its in names.values():
            places.add_owner(owner, its)
        places.save()
        self._places = places
        return None

    def note(self, owner: Any, name: str) -> None:
        if (id(owner), name) not in self._read:
            self._read[id(owner), name] = owner, name, _token_of(owner, name, _Places())

    def replace(self, clone: Block, block: Block) -> None:
        """Compare the attributes of ``block`` in place of those of ``clone``."""
        self._read = {
            (id(block if owner is clone else owner), name): (block if owner is clone else owner, name, token)
            for owner, name, token in self._read.values()
        }

    def tokens(self) -> dict[tuple[int, str], tuple[Any, str, Any]]:
        return dict(self._read)


# In place of any Reads, in a key.
ANY = Reads()


def _held_by(owner: Any) -> dict:
    return owner if isinstance(owner, dict) else vars(owner)


def _value_of(owner: Any, name: str) -> Any:
    held = _held_by(owner)
    return held[name] if name in held else _MISSING if owner is held else _of_class(owner, name)


def _of_class(owner: Any, name: str) -> Any:
    return next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), _MISSING)


def _of_classes(kind: type, names: Collection[str]) -> list[Any]:
    """Return the attributes with these names of a class and of its bases, which ``super()`` reads."""
    own = [vars(each) for each in kind.__mro__ if not _is_of_library(each)]
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
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    kind = value if isinstance(value, type) else type(value)
    if _is_of_library(kind) or isinstance(value, (Block, ModuleType)):
        return None
    held, made = ({}, ()) if value is kind else (getattr(value, "__dict__", {}), ("__init__",))
    spaces = [*(vars(each) for each in kind.__mro__ if not _is_of_library(each)), held]
    own = chain.from_iterable(each.items() for each in spaces)
    return [each for name, each in own if name in names or (name[:2] == "__" and name not in made)]


def _token_of(owner: Any, name: str, places: _Places) -> Any:
    value = _value_of(owner, name)
    if name in _mxnet.HOOKS:
        return places.add_emptiness(value)
    return _token(value, places)


# -- during a trace ---------------------------------------------------------------------------------


class Trace:
    """One run of a block's code on Symbols: what it reads and writes, and what hooks of blocks inside would get."""

    def __init__(self, block: Block, clone: Block, inside: Sequence[Block]) -> None:
        self.reads = Reads()
        self._block, self._clone = block, clone
        self._inside = [each for each in inside if each is not block]
        # By id and name: the block, the name, and what the block had before the first write.
        self._written: dict[tuple[int, str], tuple[Block, str, Any]] = {}
        # Lists and dicts that the code has read from attributes, with what they had in them.
        self._containers: list[tuple[list | dict, list | dict]] = []
        self._hooked: list[tuple[str, Block, tuple]] = []
        self._paused = False
        # Functions that may be called, the names in their code, and the classes and objects whose methods these may be.
        self._functions: dict[int, FunctionType] = {}
        self._names: set[str] = set()
        self._holders: dict[int, Any] = {}

    # -- what blocks of ``_noting_class`` say --

    def note_read(self, block: Block, name: str) -> None:
        if self._paused or name in _mxnet.BOOKKEEPING or name.startswith("__") or (id(block), name) in self._written:
            return
        if name in _mxnet.HOOKS and block is self._clone:
            return  # they get arrays
        value = vars(block).get(name)
        self._reach(value)
        if isinstance(value, (list, dict)):
            self._containers.append((value, copy.copy(value)))
        if name not in vars(block):
            found = _of_class(block, name)
            self._reach(*_of_classes(type(block), [name]))
            # The code of a method or property is noted itself. One of the user's may be replaced on the instance.
            if hasattr(type(found), "__get__") and (not isinstance(found, FunctionType) or _is_of_library(found)):
                return
        self.reads.note(block, name)

    def note_write(self, block: Block, name: str) -> None:
        if not self._paused and name not in _mxnet.BOOKKEEPING:
            self._written.setdefault((id(block), name), (block, name, vars(block).get(name, _MISSING)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _reach(self, *values: Any) -> None:
        """Note what the functions that code may call with these values read, and what those read that they name."""
        todo, known = [*values], len(self._names)
        while todo:
            value = todo.pop()
            if isinstance(value, FunctionType):
                todo += self._read_by(value)
            elif id(value) not in self._holders and (parts := _parts(value, self._names)) is not None:
                self._holders[id(value)] = value
                todo += parts
            if not todo and len(self._names) > known:
                known = len(self._names)
                again = [each for each in self._holders.values() if hasattr(each, "__dict__")]
                todo = [part for each in again for part in _parts(each, self._names) or ()]

    def _read_by(self, function: FunctionType) -> list[Any]:
        """Note what a function of the user's reads besides attributes of blocks; return the values."""
        if id(function) in self._functions or _is_of_library(function):
            return []
        self._functions[id(function)] = function
        names = _names(function.__code__)
        self._names |= names
        for name in names & vars(function).keys():
            self.reads.note(vars(function), name)
        values = [*map(_content, function.__closure__ or ()), *(function.__defaults__ or ())]
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
                self.reads.note(space, name)
                values.append(value)
            elif _is_users(value) and id(vars(value)) not in seen:
                self._read_in(vars(value), names, names, values, seen)

    # -- running it --

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the code reads and writes in the ``with`` block; afterwards all blocks have what they had."""
        kinds: list[tuple[Any, Any]] = [(each, type(each)) for each in (self._clone, *self._inside)]
        hooks = [(each, name, vars(each)[name]) for each in self._inside for name in _mxnet.HOOKS if vars(each)[name]]
        outer, _local.trace = getattr(_local, "trace", None), self
        states = _state_of(random), _state_of(np.random)
        try:
            for each in (self._block, *self._inside):
                self._reach(*_of_classes(type(each), _CALLED))
            for each, kind in kinds:
                each.__class__ = _noting_class(kind)
            for each, name, _ in hooks:
                # ``__call__`` reads these; the user's hooks run on arrays, after each call.
                vars(each)[name] = {0: partial(self._note_hook, name)}
            yield
        finally:
            _local.trace = outer
            for each, name, before in hooks:
                vars(each)[name] = before
            for each, kind in kinds:
                each.__class__ = kind
            if (_state_of(random), _state_of(np.random)) != states:
                self.reads.always_anew = "draws random numbers in Python (random, numpy.random)"
            elif any(_VALUES & _names(function.__code__) for function in self._functions.values()):
                self.reads.always_anew = "reads the values of arrays (asscalar, asnumpy)"

    def _note_hook(self, name: str, block: Block, *given: Any) -> None:
        self._hooked.append((name, block, given))

    def left(self, args: tuple) -> Left:
        """Return what the code, which got ``args``, has left behind; the blocks keep what they had before. Raises
        ``ValueError`` if a Symbol was put into a list or dict that was there before, or if a hook gets one of the body
        of a ``foreach``, ``while_loop`` or ``cond``."""
        arrays: list[mx.sym.Symbol] = []
        writes: list[tuple[Block, str, Nesting]] = []
        for block, name, before in self._written.values():
            value = vars(block).pop(name, _MISSING)
            if before is not _MISSING:
                vars(block)[name] = before
            kept = len(arrays)
            nesting = _nesting(value, arrays)
            if self._are_inner(arrays[kept:], args):
                del arrays[kept:]
                _warn_of_inner(block, name)
            elif value is not _MISSING:
                writes.append((self._block if block is self._clone else block, name, nesting))
        calls = []
        for name, block, given in self._hooked:
            kept = len(arrays)
            calls.append((name, block, _nesting(given, arrays)))
            if self._are_inner(arrays[kept:], args):
                raise ValueError(f"take off the forward hook of {block.name!r}: {_NO_ARRAY}")
        self.reads.replace(self._clone, self._block)
        if self.reads.changed() is not None:
            for owner, name, token in self.reads.tokens().values():
                if _token_of(owner, name, _Places()) != token:
                    self._refuse_symbols(owner, name)
                    self.reads.always_anew = f"changes {name!r} in place"
        return Left(arrays, writes, calls)

    def _are_inner(self, symbols: Sequence[mx.sym.Symbol], args: tuple) -> bool:
        """Return whether some read a variable that is neither in ``args`` nor a parameter: one of a loop's body."""
        if not symbols:
            return False
        inputs: list[mx.sym.Symbol] = []
        nesting_of(list(args), inputs)
        known = {*self._block.collect_params(), *chain.from_iterable(each.list_inputs() for each in inputs)}
        return not all(known.issuperset(each.list_inputs()) for each in symbols)

    def _refuse_symbols(self, owner: Any, name: str) -> None:
        value = _value_of(owner, name)
        found: list[mx.sym.Symbol] = []
        _nesting(value, found)
        if any(isinstance(each, mx.sym.Symbol) for each in found):
            raise ValueError(
                f"it puts a result into {name!r}, a {type(value).__name__} that was there before: assign a new one, "
                f"self.{name} = ..., or return the result as an output"
            )

    def undo(self) -> None:
        """Give all blocks back what the code of a failed trace has written."""
        for block, name, before in self._written.values():
            vars(block).pop(name, None) if before is _MISSING else vars(block).update({name: before})
        for container, before in reversed(self._containers):
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)


class Left:
    """What a trace has left behind besides its result."""

    # No tuple, in which MXNet's ``collect_params`` would find the blocks.
    def __init__(
        self,
        arrays: list[mx.sym.Symbol],
        writes: list[tuple[Block, str, Nesting]],
        calls: list[tuple[str, Block, Nesting]],
    ) -> None:
        # Symbols, further outputs of the graph.
        self.arrays = arrays
        # Attributes that the code has set: the block, the name, and how the value is nested.
        self._writes = writes
        # Calls of forward hooks of blocks inside: an attribute of ``_mxnet.HOOKS``, the block, and what they get.
        self._calls = calls
        self.nestings = [*[nesting for _, _, nesting in writes], *[nesting for _, _, nesting in calls]]

    @property
    def outputs(self) -> int:
        """Return how many outputs of the graph ``arrays`` are."""
        return sum(len(each.list_outputs()) for each in self.arrays)

    def repeat(self, values: Sequence[Any]) -> None:
        """Set the attributes and run the hooks with what this call gives, in the order of ``nestings``."""
        for (block, name, _), value in zip(self._writes, values):
            vars(block)[name] = value
        for (name, block, _), given in zip(self._calls, values[len(self._writes) :]):
            args = tuple(given[0]) if isinstance(given[0], list) else given[0]
            for hook in list(vars(block)[name].values()):
                hook(block, args, *given[1:])


def _warn_of_inner(block: Block, name: str) -> None:
    if not _is_of_library(type(block)):  # as MXNet's VariationalDropoutCell, for itself
        stays = f"it stays as it was, {getattr(block, name, None)!r}. Return it as a state or an output"
        warn_user(f"{name!r} of {block.name!r} is set in the body of a loop, and {_NO_ARRAY}: {stays}")


def apart(more: Sequence[mx.sym.Symbol], outputs: Sequence[mx.sym.Symbol]) -> Iterator[mx.sym.Symbol]:
    """Yield ``more`` Symbols as outputs beside ``outputs``: copies of those that are outputs already."""
    seen = {tuple(each.list_outputs()) for each in outputs}
    for each in more:
        name = tuple(each.list_outputs())
        if name in seen:
            each = _mxnet.copy_of(each)
        seen.add(name)
        yield each


def _nesting(value: Any, arrays: list) -> Nesting:
    """Return ``nesting_of`` a value; one that it does not know is passed on as it is."""
    kept = len(arrays)
    try:
        return nesting_of(value, arrays)
    except ValueError:
        del arrays[kept:]
        return Nesting(None, value)


@lru_cache(maxsize=None)
def _noting_class(kind: Any) -> Any:
    """Return a subclass of a class of blocks that tells the thread's trace what is read and written."""

    def get(self: Any, name: str) -> Any:
        trace = getattr(_local, "trace", None)
        if trace is not None:
            trace.note_read(self, name)
        return kind.__getattribute__(self, name)

    def set_(self: Any, name: str, value: Any) -> None:
        trace = getattr(_local, "trace", None)
        if trace is None:
            kind.__setattr__(self, name, value)
            return
        trace.note_write(self, name)
        with trace.paused():  # Block.__setattr__ reads what it replaces
            kind.__setattr__(self, name, value)

    if hasattr(kind, _NOTING):
        return kind
    # One base, so that blocks of either class have the same layout.
    methods = {"__getattribute__": get, "__setattr__": set_, "__module__": kind.__module__, _NOTING: True}
    return type(kind.__name__, (kind,), methods)


def _state_of(generator: Any) -> Any:
    """Return the state of a generator of random numbers, or of the global one of a module."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    name, keys, *more = generator.get_state()
    return name, keys.tobytes(), more


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
