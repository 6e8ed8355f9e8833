"""An optimizer's attributes and schedule as plain data, which is compared, and written to a file of states."""

from __future__ import annotations

import copy
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

# Attributes that a resumed run never takes from a file: they belong to its process, or to its caller's arguments.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
PLAIN = (bool, int, float, str, type(None))


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


def savable_attributes(optimizer: mx.optimizer.Optimizer) -> dict:
    """Return the attributes, not copied, that a file can hold and another run can continue from."""
    return {k: v for k, v in vars(optimizer).items() if k not in _NOT_STATE and is_data(v)}


def to_host(value: Any) -> Any:
    """Return a deep copy with NDArrays, also row-sparse ones, as dense NumPy arrays. Waits for the device."""
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def is_data(value: Any) -> bool:
    """Return whether a states file can hold ``value``, which no namedtuple can be."""
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and is_data(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return isinstance(value, (*PLAIN, NDArray, np.ndarray, np.generic))


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
        return [[k if isinstance(k, PLAIN) else repr(k), describe(v)] for k, v in schedule.items()]
    if isinstance(schedule, (list, tuple)):
        return [describe(item) for item in schedule]
    if isinstance(schedule, np.generic):
        return schedule.item()
    if isinstance(schedule, np.ndarray):
        return schedule.tolist()
    if isinstance(schedule, PLAIN):
        return copy.copy(schedule)
    if isinstance(schedule, mx.lr_scheduler.LRScheduler):
        return {"class": type(schedule).__name__, "attrs": {k: describe(v) for k, v in vars(schedule).items()}}
    return None
