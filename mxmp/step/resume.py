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

# Attributes that a resumed run never takes from a file: they belong to its process, or to its caller's arguments.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
# Attributes in which MXNet's base class keeps arguments that have other names (``learning_rate`` is ``lr``).
_SETTINGS = {"lr", "lr_mult", "wd_mult"}
_COUNTS = {"num_update", "_index_update_count", "_all_index_update_counts"}
_PLAIN = (bool, int, float, str, type(None))


class InitialOptimizer(NamedTuple):
    """What an optimizer was before its first update: its attributes and its learning-rate schedule.

    A states file must tell which attributes updates have changed: a resumed run continues from those, and the others
    are settings, which its caller may choose anew. ``accumulated`` finds them by comparison.

    Attributes
    ----------
    attributes : dict
        From the name of each attribute that ``savable_attributes`` returns (``"num_update"``) to a copy of its value on
        the host. Empty if the optimizer had made updates before this record was made.
    schedule : object
        The learning-rate schedule as plain data, which ``describe`` returned; None without one.
    """

    attributes: dict
    schedule: Any

    @classmethod
    def of(cls, optimizer: mx.optimizer.Optimizer) -> InitialOptimizer:
        """Return the InitialOptimizer of an optimizer, from its present attributes and schedule. Waits for the device.

        The schedule is the one within a FromUpdate, if there is one.
        """
        used = optimizer.num_update > optimizer.begin_num_update
        schedule, _ = without_start(optimizer.lr_scheduler)
        return cls({} if used else to_host(savable_attributes(optimizer)), describe(schedule))

    def accumulated(self, optimizer: mx.optimizer.Optimizer) -> list[str]:
        """Return the sorted names of the optimizer's attributes that differ from the initial ones (``"m_schedule"``).

        Updates have changed them, so a resumed run continues from them. MXNet's update counts are always included;
        arguments of the constructor (``"wd"``) never, as they are settings. If ``attributes`` is empty, since the
        optimizer had made updates before, every savable attribute but those arguments is included.
        """
        now = to_host(savable_attributes(optimizer))
        settings = _SETTINGS | _arguments(type(optimizer))
        changed = (k for k, v in now.items() if k not in self.attributes or not equal(v, self.attributes[k]))
        return sorted(_COUNTS | {name for name in changed if name not in settings})


def savable_attributes(optimizer: mx.optimizer.Optimizer) -> dict:
    """Return those attributes of the optimizer, by name, that a file can hold and another run can continue from.

    Left out are values that ``is_data`` refuses, and the attributes that belong to the process (``param_dict``) or that
    every run sets anew (``rescale_grad``, ``lr_scheduler``), which ``_NOT_STATE`` lists. The values are no copies.
    """
    return {k: v for k, v in vars(optimizer).items() if k not in _NOT_STATE and is_data(v)}


def to_host(value: Any) -> Any:
    """Return a deep copy of nested dicts, lists and tuples, with NDArrays as NumPy arrays. Waits for the device.

    Row-sparse arrays become dense.
    """
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def _arguments(kind: type) -> set[str]:
    """Return the names of all arguments of the constructors of the class ``kind`` and of its base classes."""
    makers = (base.__init__ for base in kind.__mro__ if "__init__" in vars(base))  # type: ignore[misc]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def is_data(value: Any) -> bool:
    """Return whether a states file can hold ``value``.

    It can hold an NDArray, a NumPy array, a bool, number (of NumPy too), string or None, and a list, tuple or dict of
    these (a dict with keys of str or int). It cannot hold a namedtuple.
    """
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and is_data(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return isinstance(value, (*_PLAIN, NDArray, np.ndarray, np.generic))


def equal(a: Any, b: Any) -> bool:
    """Return whether two nested values, of dicts, lists, tuples, NumPy arrays, numbers, strings and None, are equal.

    A list may equal a tuple. Arrays of one shape may be equal in different dtypes. NaN equals nothing.
    """
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


class FromUpdate(mx.lr_scheduler.LRScheduler):
    """A learning-rate schedule that starts at update ``start``: at update ``n`` it returns ``schedule(n - start)``.

    It is for a resumed run, whose optimizer goes on counting the updates of the saved run, while the schedule that the
    user passes begins at update 0. Every other attribute is read from ``schedule``, the user's own object, and written
    to it.
    """

    schedule: Any
    start: int

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
    """Return ``(schedule, start)`` of a FromUpdate; of any other learning-rate schedule, or None, return it and 0."""
    return (schedule.schedule, schedule.start) if isinstance(schedule, FromUpdate) else (schedule, 0)


def describe(schedule: Any) -> Any:
    """Return a learning-rate schedule as plain data: ``{"class": "FactorScheduler", "attrs": {"step": 100, ...}}``.

    JSON can hold it. ``attrs`` has all attributes: bools, numbers, strings and None as they are, another schedule as
    such a dict, a dict as a list of ``[key, value]``, a list, tuple or NumPy array as a list, anything else as None.
    Returns None for None, and for a function or another callable that is no LRScheduler but is used as a schedule. Of a
    FromUpdate, callers pass the inner schedule.
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
    """Return the class names of a schedule, and of schedules in its attributes, from what ``describe`` returned for it.

    ``["FactorScheduler"]`` for a simple schedule, ``["Warmup", ["FactorScheduler"]]`` for one that has another schedule
    as an attribute, and None without a schedule. A saved schedule can be restored only into one with equal class names.
    """
    if isinstance(described, dict):
        inner = {k: class_names(v) for k, v in described["attrs"].items()}
        return [described["class"], *(v for v in inner.values() if v)]
    if isinstance(described, list):
        return [k for k in map(class_names, described) if k]
    return None


def restore_schedule(optimizer: mx.optimizer.Optimizer, described: Any, start: int) -> None:
    """Set the attributes of the optimizer's learning-rate schedule to saved ones, and let it begin at update ``start``.

    The schedule is changed in place. At update ``n`` the optimizer then gets ``schedule(n - start)``: unless ``start``
    is 0, its ``lr_scheduler`` becomes a FromUpdate. ``described`` is what ``describe`` returned for a saved schedule of
    the same class; with None the attributes stay. Without a schedule it must be None, and nothing changes.
    """
    schedule, _ = without_start(optimizer.lr_scheduler)
    _set_attributes(schedule, described)
    optimizer.lr_scheduler = FromUpdate(schedule, start) if schedule is not None and start else schedule


def continue_schedule(optimizer: mx.optimizer.Optimizer, own: Any, saved: list, start: int) -> None:
    """Continue the saved learning-rate schedule in the optimizer of a resumed Module, or begin it if it is a new one.

    Scripts for MXNet's Module pass to a resumed run either the schedule of the first run, or a new schedule for the
    remaining updates only, since MXNet counts the updates of a resumed run from ``begin_num_update`` again. mxmp's
    Module goes on counting from the saved number.

    ``own`` is what ``describe`` returned for the user's schedule before its first update. ``saved`` is a list of what
    it returned for the saved schedule: before its first update (missing if the file is MXNet's), and when it was saved.

    The schedule continues if ``own`` is in ``saved``, and the optimizer's present schedule has the class of
    ``saved[-1]`` (it has another if one of the runs has set ``lr_scheduler`` after ``init_optimizer``). Then it gets
    the attributes in ``saved[-1]``, and its update 0 is update ``start`` of the optimizer. Otherwise it is new: it gets
    the attributes in ``own``, if that is of its class, and is called with ``begin_num_update`` at the present update.
    """
    present = class_names(describe(without_start(optimizer.lr_scheduler)[0]))
    if own in saved and class_names(saved[-1]) == present:
        restore_schedule(optimizer, saved[-1], start)
    else:
        first = own if class_names(own) == present else None
        restore_schedule(optimizer, first, optimizer.num_update - optimizer.begin_num_update)


def _set_attributes(schedule: Any, described: Any) -> None:
    """Set the attributes of a schedule, and of schedules in it, to those in ``described``, which ``describe`` returned.

    Only bools, numbers, strings and None are set; an attribute that is an array, a dict or another object stays.
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
