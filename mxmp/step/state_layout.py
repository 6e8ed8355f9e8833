"""The nesting of the state of a weight, with and without ``multi_precision``, and whether a state fits a weight."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray


class Layout:
    """How an optimizer nests the state of a weight, and where ``multi_precision`` puts the FP32 master in it.
    For a float16 weight SGD has ``(state, master)``, Adam ``(master, state)``; states of a 2x3 weight show it."""

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        probe = with_attributes(optimizer, {"multi_precision": True})
        weight = mx.nd.full((2, 3), 0.5)
        self.state = probe.create_state(0, weight)  # of the FP32 weight, as an example
        self._kind = _nesting(self.state)
        pair = probe.create_state_multi_precision(0, weight.astype("float16"))
        self._master: int | None = None
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            for k, (item, other) in enumerate((pair, pair[::-1])):
                if _nesting(other) == self._kind and isinstance(item, NDArray) and (item.asnumpy() == 0.5).all():
                    self._master = k

    def split(self, state: Any) -> tuple[Any, Any]:
        """Return the state as of an FP32 weight, and the master that ``multi_precision`` has put in it, or None."""
        pair = isinstance(state, (list, tuple)) and len(state) == 2 and _nesting(state) != self._kind
        if not pair or self._master is None or _nesting(state[1 - self._master]) != self._kind:
            return state, None
        return state[1 - self._master], state[self._master]

    def join(self, state: Any, master: Any) -> tuple:
        return (master, state) if self._master == 0 else (state, master)


def _nesting(state: Any) -> Any:
    """Return how a state is nested: ``("array", ("array", None))`` for ``[a, (b, None)]``; a number is ``"value"``."""
    if isinstance(state, (list, tuple)):
        return tuple(map(_nesting, state))
    if isinstance(state, (NDArray, np.ndarray)):
        return "array"
    # A dict is "dict", whatever it holds, since an optimizer may fill it later.
    return None if state is None else "dict" if isinstance(state, dict) else "value"


def with_attributes(optimizer: mx.optimizer.Optimizer, attributes: dict) -> mx.optimizer.Optimizer:
    other = copy.copy(optimizer)
    vars(other).update(attributes)
    return other


def check_states(states: dict, masters: dict, optimizer: mx.optimizer.Optimizer, shapes: Sequence[tuple]) -> None:
    """Raise ``ValueError`` unless a file's states and masters, by index, fit the optimizer and ``shapes``."""
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
            # Only arrays that the optimizer makes in the weight's shape.
            if getattr(like, "shape", None) == (2, 3):
                _check_shape(index, leaf.shape, shapes[index])
    for index, master in masters.items():
        _check_shape(index, master.shape, shapes[index])


def check_shapes(saved: Sequence[tuple], own: Sequence[tuple]) -> None:
    """Raise ``ValueError`` unless there are as many saved shapes as own ones, and each can be equal to its own."""
    if len(saved) != len(own):
        raise ValueError(f"the states are of other parameters: {len(saved)} of them, here are {len(own)}")
    for index, (a, b) in enumerate(zip(saved, own)):
        _check_shape(index, a, b)


def positions(
    saved: Sequence[str], own: Sequence[str], saved_shapes: Sequence[tuple], own_shapes: Sequence[tuple]
) -> list[int]:
    """Return, for each name of ``saved``, the index in ``own`` of the same parameter's name.
    Raises ``ValueError`` if the names of a pair differ in more than numbers, or if two ways of pairing are possible."""
    # MXNet numbers the blocks of a process, and a Trainer sorts by name: ``dense8_`` and ``dense9_`` become ``dense9_``
    # and ``dense10_`` when a net is built again, and ``"dense10_"`` sorts before ``"dense9_"``. Numbers keep their
    # order, so names are paired in the order in which numbers count as numbers.
    pairs = list(zip(_numerically(saved), _numerically(own)))
    kinds, own_kinds = map(_without_numbers, (saved, own))
    # If neither is in the order of strings, users passed lists of parameters. Names that match at each position are
    # then paired by position, as one of two nets may have been built again; if both lists have the same names in
    # different orders, equal names are.
    are_lists = all(list(names) != sorted(names) for names in (saved, own))
    if are_lists and kinds == own_kinds:
        if set(saved) != set(own) or list(saved) == list(own):
            return [*range(len(own))]
        # The nets may have been built in another order and have exchanged their names.
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
    if not _same_shape(saved, own):
        raise ValueError(
            f"the states are of other parameters: number {index} has shape {tuple(saved)}, here it has {tuple(own)}"
        )


def _leaves(state: Any) -> list:
    """Return the arrays, numbers, strings and dicts in a state as one list, without None."""
    if isinstance(state, (list, tuple)):
        return [leaf for item in state for leaf in _leaves(item)]
    return [] if state is None else [state]
