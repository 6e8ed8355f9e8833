"""What a graph has read of Python: attributes, globals and what is in them, compared at each call."""

from __future__ import annotations

import os
import pickle
import random
import sys
from array import array
from collections import abc, deque
from functools import lru_cache, partial
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Iterable, Iterator, Mapping, MutableMapping

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter
from mxnet.ndarray import NDArray

from . import _mxnet
from .nesting import is_constant

# In place of the value of a name that there is not.
MISSING = object()
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
# How deep values are compared, in containers and objects inside each other; what is deeper, by identity.
DEPTH = 6
_LIBRARIES = {
    *("mxnet", "mxmp", "numpy", "builtins", "threading", "_thread", "logging", "enum", "abc", "typing", "weakref"),
}
# Classes of values that are compared by their contents.
_CONTENTS = (
    *(int, float, complex, str, bytes, bytearray, array, np.ndarray, list, tuple, set, frozenset, deque, Mapping),
    partial,
)
# Where Python's own modules are, and below it those of installed packages.
INSTALLED = os.path.dirname(os.__file__)


class Enclosing(MutableMapping[str, Any]):
    """The variables of enclosing functions that a function reads, by name, as they are at the time."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def __getitem__(self, name: str) -> Any:
        return content_of(self._cells[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


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
        inherited = [name for name in names if name not in names_in(owner)]
        if inherited and not isinstance(owner, (dict, Enclosing)):
            self.add(_Live(lambda: [of_class(owner, name) for name in inherited]))

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
        held = (map(names_in(owner).get, names, repeat(MISSING)) for owner, names in self._owners)
        return chain(chain.from_iterable(held), chain.from_iterable(self._containers))


class _Live:
    """What a function returns at the time, as a container."""

    def __init__(self, read: Callable[[], Iterable]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len([*self._read()])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def _token(value: Any, places: _Places, depth: int = DEPTH) -> Any:
    """Return what equals the token of another value if code that makes a graph reads the same from both."""
    token = _token_of_contents(value, places, depth)
    return (token, _token_of_attributes(value, places, depth)) if depth > 0 and is_derived(value) else token


def is_derived(value: Any) -> bool:
    """Return whether a container, number or string is of a user's class, which may add attributes and methods."""
    return isinstance(value, _CONTENTS) and is_users(type(value))


def _token_of_attributes(value: Any, places: _Places, depth: int) -> Any:
    """Return the token of an object of the user's without what it contains; an empty tuple if it has no attributes."""
    inside = partial(_token, places=places, depth=depth - 1)
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    held = _Live(lambda: [getattr(value, name, MISSING) for name in slots])
    if slots:
        places.add(held)
    own = getattr(value, "__dict__", None)
    if own is None and not slots:
        return ()
    return inside(type(value)), inside({} if own is None or own is value else own), tuple(map(inside, held))


def _token_of_contents(value: Any, places: _Places, depth: int) -> Any:
    if isinstance(value, type):
        return _Same(value), _token_of_class(value, places, depth)
    if value is None or is_constant(value):
        return type(value), repr(value)
    if isinstance(value, (NDArray, mx.sym.Symbol)):
        return NDArray  # whose values no trace reads, but by ``_VALUES``
    if isinstance(value, np.ndarray):
        return places.add_content(lambda: (value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, _GENERATORS):
        return _Same(value), state_of(value)
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
    # Weak ones are caches, such as that of ``functools.singledispatch``.
    if isinstance(value, Mapping) and type(value).__module__ != "weakref":
        for read in (value.keys, value.values):
            places.add(read() if isinstance(value, dict) and not is_derived(value) else _Live(read))
        return type(value), tuple((_key(key), inside(each)) for key, each in value.items())
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell is not None]
        places.add(_Live(lambda: [content_of(cell) for cell in cells]))
        return _Same(value), tuple(inside(content_of(cell)) for cell in cells), inside(vars(value))
    if isinstance(value, MethodType):
        return inside(value.__func__), inside(value.__self__)
    if isinstance(value, partial):
        return inside(value.func), inside(value.args), inside(value.keywords)
    if is_of_library(type(value)):
        rates = [name for name in ("learning_rate", "base_lr") if hasattr(value, name)]  # of Trainers and schedules
        return _Same(value), [places.add_content(partial(getattr, value, name)) for name in rates]
    return _token_of_attributes(value, places, depth) or _Same(value)


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    return [name for name in ([found] if isinstance(found, str) else found) if name[:2] != "__"]


def _token_of_class(kind: type, places: _Places, depth: int) -> Any:
    """Return what equals the token of the class at another time if no value in it, or in its bases, has changed."""
    if depth == 0 or not is_users(kind) or issubclass(kind, Block):  # blocks say what is read of their classes
        return ()
    for each in kind.__mro__:
        if is_users(each):
            places.add(vars(each).values())
    return tuple((name, _token(value, places, depth - 1)) for name, value in _values_in(kind).items())


def _values_in(kind: type) -> dict[str, Any]:
    """Return the values of a class of the user's that are no methods, and the like, by name."""
    own = [vars(each) for each in reversed(kind.__mro__) if is_users(each)]
    held = {name: value for each in own for name, value in each.items()}
    return {name: value for name, value in held.items() if is_value(name, value)}


def is_value(name: str, value: Any) -> bool:
    """Return whether an attribute of a class is no method, property or the like."""
    return name[:2] != "__" and not hasattr(type(value), "__get__")


def _key(key: Any) -> Any:
    return (type(key), repr(key)) if is_constant(key) else _Same(key)


def content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


def is_of_library(kind: Any) -> bool:
    return _root(kind) in _LIBRARIES


def is_users(kind: Any) -> bool:
    """Return whether a class or function is neither of a library nor of Python's own, whose globals do not change."""
    return not (is_of_library(kind) or _is_pythons(_root(kind)))


def _root(kind: Any) -> str:
    return (kind.__module__ or "").partition(".")[0]


@lru_cache(maxsize=None)
def _is_pythons(name: str) -> bool:
    module = sys.modules.get(name)
    if file := getattr(module, "__file__", None):
        return file.startswith(INSTALLED) and "-packages" not in file
    return getattr(getattr(module, "__spec__", None), "origin", None) in ("built-in", "frozen")


class Reads:
    """What the code of one graph has read of Python, by owner (a block, or what ``names_in`` says) and name."""

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

    def differences(self) -> Iterator[tuple[str, Any]]:
        """Yield the names of which a trace would read another value now, and this value."""
        if self.changed() is not None:
            for owner, name, token in self._read.values():
                if _token_of(owner, name, _Places()) != token:
                    yield name, _value_of(owner, name)


# In place of any Reads, in a key.
ANY = Reads()


def names_in(owner: Any) -> Any:
    """Return the names and values of an owner of what is read: globals, an Enclosing, a block or a class."""
    # Runs for every block in each call; isinstance takes long for an abstract class.
    return owner if isinstance(owner, dict) or type(owner) is Enclosing else vars(owner)


def _value_of(owner: Any, name: str) -> Any:
    held = names_in(owner)
    return held[name] if name in held else MISSING if owner is held else of_class(owner, name)


def of_class(owner: Any, name: str) -> Any:
    return next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), MISSING)


def _token_of(owner: Any, name: str, places: _Places) -> Any:
    value = _value_of(owner, name)
    if name in _mxnet.HOOKS:
        return places.add_emptiness(value)
    return _token(value, places)


def is_generator(value: Any) -> bool:
    """Return whether a value draws random numbers of Python's or NumPy's."""
    return value in (random, np.random) if isinstance(value, ModuleType) else isinstance(value, _GENERATORS)


def state_of(generator: Any) -> bytes:
    """Return the state of a generator of random numbers, or of the global one of a module."""
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps((generator.getstate if hasattr(generator, "getstate") else generator.get_state)())


def set_state(generator: Any, state: bytes) -> None:
    """Give a generator back a state that ``state_of`` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    else:
        (generator.setstate if hasattr(generator, "setstate") else generator.set_state)(pickle.loads(state))
