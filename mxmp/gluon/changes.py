"""What code changes in objects of the user's, to be undone where no call was asked for."""

from __future__ import annotations

import copy
from collections import deque
from itertools import chain
from operator import is_
from typing import Any, Iterator, Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Parameter
from mxnet.ndarray import NDArray

from .reads import DEPTH, MISSING, is_generator, is_of_library, names_in, set_state, state_of


class Before:
    """What was in containers, objects, classes and globals before code changed it."""

    def __init__(self, *, arrays: bool = False) -> None:
        # By id, which stays theirs while they live here: a container or the attributes of an object, and a copy.
        self._contents: dict[int, tuple[Any, Any]] = {}
        # Likewise: generators of random numbers, and their states.
        self._generators: dict[int, tuple[Any, Any]] = {}
        # Likewise: NDArrays and copies; None in a trace, whose code writes into none.
        self._arrays: dict[int, tuple[NDArray, NDArray]] | None = {} if arrays else None
        # Names of globals, classes and variables of enclosing functions, and what they had.
        self._named: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def keep_name(self, owner: Any, name: str) -> None:
        """Keep a name of an owner (``reads.names_in``), before it is changed, and what is in its value."""
        value = names_in(owner).get(name, MISSING)
        self._named.setdefault((id(owner), name), (owner, name, value))
        self.keep(value)

    def keep(self, value: Any) -> None:
        """Keep what is in a value, as deep as values are compared."""
        level = [value]
        for _ in range(DEPTH):
            for each in level:
                if is_generator(each) and id(each) not in self._generators:
                    self._generators[id(each)] = each, state_of(each)
                elif isinstance(each, NDArray) and self._arrays is not None and id(each) not in self._arrays:
                    with autograd.pause():
                        self._arrays[id(each)] = each, each.copy()
            found = {id(held): held for each in level for held in _held_by(each)}
            new = [held for number, held in found.items() if number not in self._contents]
            self._contents.update({id(held): (held, copy.copy(held)) for held in new})
            level = list(chain.from_iterable(map(_inside, new)))

    def restore(self) -> None:
        for owner, name, value in self._named.values():
            if names_in(owner).get(name, MISSING) is value:
                continue
            if isinstance(owner, type):
                delattr(owner, name) if value is MISSING else setattr(owner, name, value)
            else:
                owner.pop(name, None) if value is MISSING else owner.update({name: value})
        for generator, state in self._generators.values():
            set_state(generator, state)
        with autograd.pause():
            for array, copied in (self._arrays or {}).values():
                copied.copyto(array)
        for held, before in self._contents.values():
            if isinstance(held, np.ndarray):
                if held.tobytes() != before.tobytes():
                    held[...] = before
            elif len(held) != len(before) or not all(map(is_, _parts(held), _parts(before))):
                held.clear()
                held.extend(before) if isinstance(held, (list, deque)) else held.update(before)


def has_symbol(value: Any, depth: int = DEPTH) -> bool:
    """Return whether there is a Symbol in a value: in containers and objects of the user's inside each other."""
    if isinstance(value, mx.sym.Symbol) or depth == 0:
        return isinstance(value, mx.sym.Symbol)
    held = _held_by(value)
    if isinstance(value, (Mapping, frozenset)) and not isinstance(value, dict):
        held.append(value.values() if isinstance(value, Mapping) else value)
    return any(has_symbol(each, depth - 1) for each in list(chain.from_iterable(map(_inside, held))))


def _inside(held: Any) -> Any:
    return () if isinstance(held, np.ndarray) else held.values() if isinstance(held, dict) else held


def _parts(held: Any) -> Iterator[Any]:
    return chain(held, held.values()) if isinstance(held, dict) else iter(held)


def _held_by(value: Any) -> list[Any]:
    """Return what of a value code may change: itself, and the dict of its attributes, if it is of the user's."""
    held = [value] if isinstance(value, (list, tuple, dict, set, deque, np.ndarray)) else []
    if not isinstance(value, (type, Block, Parameter)) and not is_of_library(type(value)):
        held += [own for own in [getattr(value, "__dict__", None)] if own is not None and own is not value]
    return held
