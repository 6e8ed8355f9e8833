"""The nesting of the state of a weight, with and without ``multi_precision``, and whether a state fits a weight."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with every other value in them replaced by ``function(value)``.

    None and a namedtuple are passed to ``function`` like any other value. For a ``value`` that is itself no dict, list
    or tuple, returns ``function(value)``.
    """
    if isinstance(value, dict):
        return {k: map_leaves(function, v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(function, v) for v in value)
    return function(value)


def for_half(optimizer: mx.optimizer.Optimizer, state: Any, master: np.ndarray) -> Any:
    """Return the optimizer's state of an FP32 weight in the form that it needs for a float16 weight without masters.

    ``state`` holds NumPy arrays; ``master`` is the FP32 weight. With ``multi_precision`` the result is the pair of
    ``state`` and ``master`` in the optimizer's order. Otherwise it is a copy of ``state`` in which all arrays are
    float16.
    """
    if optimizer.multi_precision:
        return Layout(optimizer).join(state, master)
    return map_leaves(lambda leaf: leaf.astype(np.float16) if isinstance(leaf, np.ndarray) else leaf, state)


class Layout:
    """How an optimizer nests the state of a weight, and where ``multi_precision`` puts the FP32 master in it.

    For a float16 weight SGD has ``(state, master)``, Adam ``(master, state)``. The constructor finds the order: a copy
    of the optimizer makes the states of a 2x3 weight in FP32 and in float16. The attribute ``state`` is the FP32
    weight's state, as an example.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        probe = with_attributes(optimizer, {"multi_precision": True})
        weight = mx.nd.full((2, 3), 0.5)
        self.state = probe.create_state(0, weight)
        self._kind = _nesting(self.state)
        pair = probe.create_state_multi_precision(0, weight.astype("float16"))
        self._master: int | None = None
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            for k, (item, other) in enumerate((pair, pair[::-1])):
                if _nesting(other) == self._kind and isinstance(item, NDArray) and (item.asnumpy() == 0.5).all():
                    self._master = k

    def split(self, state: Any) -> tuple[Any, Any]:
        """Return the state of an FP32 weight and its master, which ``multi_precision`` has combined in ``state``.

        If there is no master inside, return ``state`` as it is, and None.
        """
        pair = isinstance(state, (list, tuple)) and len(state) == 2 and _nesting(state) != self._kind
        if not pair or self._master is None or _nesting(state[1 - self._master]) != self._kind:
            return state, None
        return state[1 - self._master], state[self._master]

    def join(self, state: Any, master: Any) -> tuple:
        """Return the pair of state and FP32 master in the order of ``multi_precision``; the inverse of ``split``."""
        return (master, state) if self._master == 0 else (state, master)


def _nesting(state: Any) -> Any:
    """Return how a state is nested: ``("array", ("array", None))`` for ``[a, (b, None)]`` with arrays ``a`` and ``b``.

    A list becomes a tuple, and None stays None. A dict becomes ``"dict"``, whatever it holds, since an optimizer may
    fill it later. A number or string becomes ``"value"``.
    """
    if isinstance(state, (list, tuple)):
        return tuple(map(_nesting, state))
    if isinstance(state, (NDArray, np.ndarray)):
        return "array"
    return None if state is None else "dict" if isinstance(state, dict) else "value"


def with_attributes(optimizer: mx.optimizer.Optimizer, attributes: dict) -> mx.optimizer.Optimizer:
    """Return a shallow copy of the optimizer in which attributes have other values.

    ``attributes`` maps their names to these values. The copy shows which states the optimizer would make with them. The
    optimizer itself is not changed.
    """
    other = copy.copy(optimizer)
    vars(other).update(attributes)
    return other


def check_states(states: dict, masters: dict, optimizer: mx.optimizer.Optimizer, shapes: Sequence[tuple]) -> None:
    """Raise ``ValueError`` unless states and masters of a file fit this optimizer and parameters of these shapes.

    ``states`` and ``masters`` are dicts from a parameter's index, which is its position in ``shapes``; either may lack
    any parameter. A state must be nested as the optimizer nests the state of an FP32 weight. Masters must have the
    parameter's shape, and so must those arrays of a state that the optimizer makes in the weight's shape. A dimension
    of 0 or -1 matches any size, and an empty shape any shape.
    """
    model = Layout(optimizer).state
    for index in [*states, *masters]:
        if not isinstance(index, int) or not 0 <= index < len(shapes):
            raise ValueError(f"the states are of other parameters: number {index} of {len(shapes)}")
    for index, state in states.items():
        if _nesting(state) != _nesting(model):
            raise ValueError(
                f"the state of parameter number {index} is not what {type(optimizer).__name__} makes with these options"
            )
        for leaf, like in zip(_leaves(state), _leaves(model)):
            if getattr(like, "shape", None) == (2, 3):
                _check_shape(index, leaf.shape, shapes[index])
    for index, master in masters.items():
        _check_shape(index, master.shape, shapes[index])


def check_shapes(saved: Sequence[tuple], own: Sequence[tuple]) -> None:
    """Raise ``ValueError`` unless ``saved``, the shapes in a file, are as many as ``own``, the parameters', and equal.

    A dimension of 0 or -1 is not known and matches any size; an empty shape matches any shape.
    """
    if len(saved) != len(own):
        raise ValueError(f"the states are of other parameters: {len(saved)} of them, here are {len(own)}")
    for index, (a, b) in enumerate(zip(saved, own)):
        _check_shape(index, a, b)


def positions(
    saved: Sequence[str], own: Sequence[str], saved_shapes: Sequence[tuple], own_shapes: Sequence[tuple]
) -> list[int]:
    """Return, for each name of ``saved``, the index in ``own`` of the same parameter's name.

    ``saved`` has the names in a file, and ``own`` as many names here; the shapes are in the orders of the names.

    MXNet numbers the blocks of a process, and a Trainer sorts parameters by name: ``dense8_`` and ``dense9_`` become
    ``dense9_`` and ``dense10_`` when the same code builds the net again, and ``"dense10_"`` sorts before ``"dense9_"``.
    The numbers keep their order, so names are paired in the order in which numbers count as numbers.

    But if neither ``saved`` nor ``own`` is in the order of strings, users passed lists of parameters to the Trainers.
    If the names at each position match, they are paired, because one of two nets may have been built again. Two names
    match if they differ only in their numbers and in the beginning that all names of a list share. If both lists have
    the same names in different orders, equal names are paired instead.

    Raises ``ValueError`` if two names of a pair do not match. Raises it, too, if lists have the same names in different
    orders, and the names and shapes at each position match: the nets may have been built in another order and have
    exchanged their names.
    """
    pairs = list(zip(_numerically(saved), _numerically(own)))
    kinds, own_kinds = map(_without_numbers, (saved, own))
    are_lists = all(list(names) != sorted(names) for names in (saved, own))
    if are_lists and kinds == own_kinds:
        if set(saved) != set(own) or list(saved) == list(own):
            return [*range(len(own))]
        if all(map(_same_shape, saved_shapes, own_shapes)):
            k = next(k for k, names in enumerate(zip(saved, own)) if names[0] != names[1])
            raise ValueError(
                f"the list of parameters had {saved[k]!r} where it has {own[k]!r} here, and both have the shape "
                f"{tuple(own_shapes[k])}: nets that are built in another order exchange their names, so the states "
                "could be of either; build the nets and list their parameters in the order of the saved run"
            )
    for i, k in pairs if len(saved) == len(own) else ():
        if kinds[i] != own_kinds[k]:
            raise ValueError(
                f"the states are of other parameters: {saved[i]!r}, and here is {own[k]!r} in its place; give the "
                "blocks and variables the names that they had in the saved run"
            )
    return [k for _, k in sorted(pairs)]


def _numerically(names: Sequence[str]) -> list[int]:
    """Return the indices that sort ``names``, where numbers in a name are compared as numbers."""

    def key(i: int) -> list:
        return [int(part) if k % 2 else part for k, part in enumerate(re.split("([0-9]+)", names[i]))]

    return sorted(range(len(names)), key=key)


def _without_numbers(names: Sequence[str]) -> list[str]:
    """Return ``names`` without the numbers in them, and then without the beginning that all the results share."""
    plain = [re.sub("[0-9]+", "", name) for name in names]
    shared = [*itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*plain))]
    return [name[len(shared) :] for name in plain]


def _same_shape(saved: Sequence[int], own: Sequence[int]) -> bool:
    """Return whether two shapes can be equal: a size of 0 or -1 is unknown, as is every size of an empty shape."""
    if not saved or not own:
        return True
    return len(saved) == len(own) and all(a == b or a <= 0 or b <= 0 for a, b in zip(saved, own))


def _check_shape(index: int, saved: Sequence[int], own: Sequence[int]) -> None:
    """Raise ``ValueError`` unless ``saved`` and ``own``, two shapes of the parameter with this index, are equal.

    A dimension of 0 or -1 is not known and matches any size; an empty shape matches any shape.
    """
    if not _same_shape(saved, own):
        raise ValueError(
            f"the states are of other parameters: number {index} has shape {tuple(saved)}, here it has {tuple(own)}"
        )


def _leaves(state: Any) -> list:
    """Return the arrays, numbers, strings and dicts in a state as one list in their order; leave None out.

    Lists and tuples are opened; a dict is one item.
    """
    if isinstance(state, (list, tuple)):
        return [leaf for item in state for leaf in _leaves(item)]
    return [] if state is None else [state]
