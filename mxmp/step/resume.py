"""The parts of an optimizer that a resumed run takes from a file of states, and those that it takes from its caller.
``gluon.Trainer.load_states`` takes all of it from the file, ``mx.mod.Module`` only the states. mxmp's Module takes the
counters and what an optimizer has accumulated from the file, too.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

# Attributes that a resumed run never takes from a file: they belong to its process, or to its caller's arguments.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
# Attributes in which MXNet's base class keeps arguments that have other names (``learning_rate`` is ``lr``).
_SETTINGS = {"lr", "lr_mult", "wd_mult"}
_COUNTS = {"num_update", "_index_update_count", "_all_index_update_counts"}
_PLAIN = (bool, int, float, str, type(None))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with ``function`` of all else, None and namedtuples too."""
    if isinstance(value, dict):
        return {k: map_leaves(function, v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(function, v) for v in value)
    return function(value)


class InitialOptimizer(NamedTuple):
    """An optimizer before its first update. A resumed run continues what updates have changed."""

    attributes: dict  # values on the host, by name; empty if updates were made before
    schedule: Any  # plain data from ``describe``, or None

    @classmethod
    def of(cls, optimizer: mx.optimizer.Optimizer) -> InitialOptimizer:
        """Return the present attributes and schedule. Waits for the device."""
        used = optimizer.num_update > optimizer.begin_num_update
        schedule, _ = without_start(optimizer.lr_scheduler)
        return cls({} if used else to_host(savable_attributes(optimizer)), describe(schedule))

    def accumulated(self, optimizer: mx.optimizer.Optimizer) -> list[str]:
        """Return the sorted names of the attributes that updates have changed, always with MXNet's update counts."""
        now = to_host(savable_attributes(optimizer))
        settings = _SETTINGS | _arguments(type(optimizer))
        changed = (k for k, v in now.items() if k not in self.attributes or not equal(v, self.attributes[k]))
        return sorted(_COUNTS | {name for name in changed if name not in settings})


def savable_attributes(optimizer: mx.optimizer.Optimizer) -> dict:
    """Return the attributes, not copied, that a file can hold and another run can continue from."""
    return {k: v for k, v in vars(optimizer).items() if k not in _NOT_STATE and is_data(v)}


def to_host(value: Any) -> Any:
    """Return a deep copy with NDArrays, also row-sparse ones, as dense NumPy arrays. Waits for the device."""
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def _arguments(kind: type) -> set[str]:
    """Return the names of all arguments of the constructors of a class and its base classes."""
    makers = (base.__init__ for base in kind.__mro__ if "__init__" in vars(base))  # type: ignore[misc]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def is_data(value: Any) -> bool:
    """Return whether a states file can hold ``value``, which no namedtuple can be."""
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and is_data(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return isinstance(value, (*_PLAIN, NDArray, np.ndarray, np.generic))


def equal(a: Any, b: Any) -> bool:
    """Return whether nested data is equal: a list may equal a tuple, dtypes may differ, and NaN equals nothing."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


class FromUpdate(mx.lr_scheduler.LRScheduler):
    """A learning-rate schedule that starts at update ``start``; all other attributes are those of ``schedule``."""

    schedule: Any
    start: int

    # A resumed run's optimizer goes on counting updates, while the schedule that the user passes begins at update 0.
    def __init__(self, schedule: Any, start: int) -> None:
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "start", start)

    def __call__(self, num_update: int) -> float:
        return self.schedule(num_update - self.start)

    def __getattr__(self, name: str) -> Any:
        if name in ("schedule", "start"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.schedule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.schedule, name, value)


def without_start(schedule: Any) -> tuple[Any, int]:
    """Return ``(schedule, start)`` of a FromUpdate; of anything else, also None, return it and 0."""
    return (schedule.schedule, schedule.start) if isinstance(schedule, FromUpdate) else (schedule, 0)


def describe(schedule: Any) -> Any:
    """Return a schedule as data for JSON: ``{"class": "FactorScheduler", "attrs": {"step": 100, ...}}``.
    What JSON cannot hold is None in it, and so is a function that is used as a schedule."""
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
    """Return the class names of a described schedule and those in it: ``["Warmup", ["FactorScheduler"]]``."""
    if isinstance(described, dict):
        inner = {k: class_names(v) for k, v in described["attrs"].items()}
        return [described["class"], *(v for v in inner.values() if v)]
    if isinstance(described, list):
        return [k for k in map(class_names, described) if k]
    return None


def restore_schedule(optimizer: mx.optimizer.Optimizer, described: Any, start: int) -> None:
    """Set the schedule's attributes to ``described``, unless that is None, and begin it at update ``start``."""
    schedule, _ = without_start(optimizer.lr_scheduler)
    _set_attributes(schedule, described)
    optimizer.lr_scheduler = FromUpdate(schedule, start) if schedule is not None and start else schedule


def continue_schedule(optimizer: mx.optimizer.Optimizer, own: Any, saved: list, start: int) -> None:
    """Continue the saved learning-rate schedule, or begin the user's, which was ``own`` before its first update.
    ``saved``: the schedule before its first update (missing in MXNet's files), and when it was saved."""
    # Scripts for MXNet's Module pass to a resumed run the first run's schedule, or one for the remaining updates, since
    # MXNet counts from ``begin_num_update`` again. mxmp's Module goes on counting from the saved number. Classes differ
    # if a run has set ``lr_scheduler`` after ``init_optimizer``.
    present = class_names(describe(without_start(optimizer.lr_scheduler)[0]))
    if own in saved and class_names(saved[-1]) == present:
        restore_schedule(optimizer, saved[-1], start)
    else:
        first = own if class_names(own) == present else None
        restore_schedule(optimizer, first, optimizer.num_update - optimizer.begin_num_update)


def _set_attributes(schedule: Any, described: Any) -> None:
    """Set the described bools, numbers, strings and None, also of schedules inside; leave all else."""
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
