"""The parts of an optimizer that a resumed run takes from a file of states, and those that it takes from its caller.

``gluon.Trainer.load_states`` takes all of it from the file, ``mx.mod.Module`` only the states: learning rate, schedule,
weight decay and the like are the caller's. mxmp's Module takes the counters and what an optimizer has accumulated from
the file, too.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .state_layout import map_leaves

__all__ = [
    "AsMade",
    "class_names",
    "continue_schedule",
    "describe",
    "equal",
    "restore_schedule",
    "savable_attributes",
    "to_host",
    "without_start",
]

# Attributes that a resumed run never takes from a file: they belong to its process, or to its caller's arguments.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
# Attributes in which MXNet's base class keeps arguments that have other names (``learning_rate`` is ``lr``).
_SETTINGS = {"lr", "lr_mult", "wd_mult"}
_COUNTS = {"num_update", "_index_update_count", "_all_index_update_counts"}
_PLAIN = (bool, int, float, str, type(None))


class AsMade(NamedTuple):
    """An optimizer as its user made it, before its first update, to tell later what updates have changed.

    Attributes
    ----------
    attributes : dict
        From the name of an attribute to a copy of its value on the host. Empty if the optimizer had updated already.
    schedule : object
        The learning-rate schedule as ``describe`` returns it; None without one.
    """

    attributes: dict
    schedule: Any

    @classmethod
    def of(cls, optimizer: mx.optimizer.Optimizer) -> AsMade:
        """Return an AsMade of the optimizer as it is now; a copy, which later updates do not change.

        If the optimizer has updated already, ``attributes`` is empty: any attribute may have changed since it was made.
        """
        used = optimizer.num_update > optimizer.begin_num_update
        schedule, _ = without_start(optimizer.lr_scheduler)
        return cls({} if used else to_host(savable_attributes(optimizer)), describe(schedule))

    def accumulated(self, optimizer: mx.optimizer.Optimizer) -> list[str]:
        """Return the sorted names of the attributes that updates have changed in ``optimizer``.

        A resumed run continues from them. Always includes MXNet's update counts. Arguments of the constructor
        (``"wd"``) are left out, as they are settings.
        """
        now = to_host(savable_attributes(optimizer))
        settings = _SETTINGS | _arguments(type(optimizer))
        changed = (k for k, v in now.items() if k not in self.attributes or not equal(v, self.attributes[k]))
        return sorted(_COUNTS | {name for name in changed if name not in settings})


def savable_attributes(optimizer: mx.optimizer.Optimizer) -> dict:
    """Return those attributes of the optimizer, by name, that a file can hold and another run can continue from.

    They are arrays, numbers, strings, None, and dicts or lists of these. What belongs to one process or its arguments
    is left out: ``param_dict``, ``lr_scheduler``, ``rescale_grad`` and the like.
    """
    return {k: v for k, v in vars(optimizer).items() if k not in _NOT_STATE and _is_data(v)}


def to_host(value: Any) -> Any:
    """Return a deep copy of nested dicts, lists and tuples, with NDArrays as NumPy arrays. Waits for the device.

    Row-sparse arrays become dense.
    """
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def _arguments(kind: type) -> set[str]:
    """Return the names of all arguments of the constructors of a class and its base classes."""
    makers = (base.__init__ for base in kind.__mro__ if "__init__" in vars(base))  # type: ignore[misc]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def _is_data(value: Any) -> bool:
    """Return whether ``value`` is an array, plain data, or a dict, list or tuple of those; keys are str or int."""
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_data(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return isinstance(value, (*_PLAIN, NDArray, np.ndarray))


def equal(a: Any, b: Any) -> bool:
    """Return whether two nestings of dicts, lists, NumPy arrays and plain data are equal; a list may equal a tuple."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


class FromUpdate(mx.lr_scheduler.LRScheduler):
    """A learning-rate schedule that starts at update ``start``: at update ``n`` it returns ``schedule(n - start)``.

    Made for a resumed run, whose optimizer goes on counting updates while the user's schedule begins at 0. All other
    attributes are read from and written to ``schedule``, the user's own object.
    """

    schedule: Any
    start: int

    def __init__(self, schedule: Any, start: int) -> None:
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "start", start)

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of update ``num_update`` of the optimizer."""
        return self.schedule(num_update - self.start)

    def __getattr__(self, name: str) -> Any:
        if name in ("schedule", "start"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.schedule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.schedule, name, value)


def without_start(schedule: Any) -> tuple[Any, int]:
    """Return the user's own schedule, and the update from which it counts.

    These are ``schedule`` and 0, unless ``schedule`` is a FromUpdate.
    """
    return (schedule.schedule, schedule.start) if isinstance(schedule, FromUpdate) else (schedule, 0)


def describe(schedule: Any) -> Any:
    """Return a schedule as plain data for JSON: ``{"class": "FactorScheduler", "attrs": {"step": 100, ...}}``.

    Attributes are described likewise; schedules in them too. A dict becomes a list of pairs, an array a list. What
    cannot be described becomes None, also a schedule that is no ``LRScheduler``.
    """
    if isinstance(schedule, dict):
        return [[k if isinstance(k, _PLAIN) else repr(k), describe(v)] for k, v in schedule.items()]
    if isinstance(schedule, (list, tuple)):
        return [describe(item) for item in schedule]
    if isinstance(schedule, np.generic):
        return schedule.item()
    if isinstance(schedule, np.ndarray):
        return schedule.tolist()
    if isinstance(schedule, _PLAIN):
        return copy.copy(schedule)
    if isinstance(schedule, mx.lr_scheduler.LRScheduler):
        return {"class": type(schedule).__name__, "attrs": {k: describe(v) for k, v in vars(schedule).items()}}
    return None


def class_names(described: Any) -> Any:
    """Return the class names in what ``describe`` returned for a schedule: its own, and those of schedules in it.

    ``["FactorScheduler"]`` for a simple schedule, a nested list for one that contains others, and None without a
    schedule. Two schedules can only continue from each other if these are equal.
    """
    if isinstance(described, dict):
        inner = {k: class_names(v) for k, v in described["attrs"].items()}
        return [described["class"], *(v for v in inner.values() if v)]
    if isinstance(described, list):
        return [k for k in map(class_names, described) if k]
    return None


def restore_schedule(optimizer: mx.optimizer.Optimizer, described: Any, start: int) -> None:
    """Set the attributes of the optimizer's schedule to ``described``, and let it count updates from ``start``.

    ``described`` comes from ``describe``, of a schedule with the same class names. Without a schedule nothing happens.
    """
    schedule, _ = without_start(optimizer.lr_scheduler)
    _set_attributes(schedule, described)
    optimizer.lr_scheduler = FromUpdate(schedule, start) if schedule is not None and start else schedule


def continue_schedule(optimizer: mx.optimizer.Optimizer, own: Any, saved: list, start: int) -> None:
    """Continue the user's schedule from its saved state, if it was saved; otherwise let it start at the present update.

    For ``Module``: scripts for MXNet's Module pass only the rest of a schedule to a resumed run, whose updates MXNet
    counts from ``begin_num_update`` again.

    Parameters
    ----------
    optimizer : mx.optimizer.Optimizer
        Has the user's schedule, and the saved update counts.
    own : object
        The user's schedule as it was made, described by ``describe``.
    saved : list
        Descriptions of the saved schedule: as it was made, if the file says so, and last its state when it was saved.
        If ``own`` equals one of them, the user's schedule is the saved one.
    start : int
        The update at which the saved schedule started.
    """
    if own in saved:
        restore_schedule(optimizer, saved[-1], start)
    else:
        restore_schedule(optimizer, own, optimizer.num_update - optimizer.begin_num_update)


def _set_attributes(schedule: Any, described: Any) -> None:
    """Set the plain attributes of a schedule, and of schedules in it, to those in ``described``.

    Attributes that the schedule does not have, or that are not plain data, are left as they are.
    """
    if not isinstance(described, dict):
        return
    for name, value in described["attrs"].items():
        current = getattr(schedule, name, None)
        if isinstance(current, mx.lr_scheduler.LRScheduler):
            _set_attributes(current, value)
        elif isinstance(current, (list, tuple)):
            for item, saved in zip(current, value or ()):
                if isinstance(item, mx.lr_scheduler.LRScheduler):
                    _set_attributes(item, saved)
        elif isinstance(current, (*_PLAIN, np.generic)) and isinstance(value, _PLAIN):
            setattr(schedule, name, value)
