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

# Attributes that belong to the process or to the run's arguments, in any resumed run.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
# Attributes that MXNet's base class makes of its arguments under other names.
_SETTINGS = {"lr", "lr_mult", "wd_mult"}
_COUNTS = {"num_update", "_index_update_count", "_all_index_update_counts"}
_PLAIN = (bool, int, float, str, type(None))


class AsMade(NamedTuple):
    """An optimizer's attributes and its schedule before its first update."""

    attributes: dict
    schedule: Any

    @classmethod
    def of(cls, optimizer: mx.optimizer.Optimizer) -> AsMade:
        """Record them. An optimizer that has updated before may have accumulated all that is no argument."""
        used = optimizer.num_update > optimizer.begin_num_update
        schedule, _ = without_start(optimizer.lr_scheduler)
        return cls({} if used else to_host(savable_attributes(optimizer)), describe(schedule))

    def accumulated(self, optimizer: mx.optimizer.Optimizer) -> list[str]:
        """Return the names of the attributes that updates have changed: counts, and what is no argument."""
        now = to_host(savable_attributes(optimizer))
        settings = _SETTINGS | _arguments(type(optimizer))
        changed = (k for k, v in now.items() if k not in self.attributes or not equal(v, self.attributes[k]))
        return sorted(_COUNTS | {name for name in changed if name not in settings})


def savable_attributes(optimizer: mx.optimizer.Optimizer) -> dict:
    """Return the optimizer's attributes that a file can hold and another run may take over."""
    return {k: v for k, v in vars(optimizer).items() if k not in _NOT_STATE and _is_data(v)}


def to_host(value: Any) -> Any:
    """Return deep copies, with arrays as NumPy's; row-sparse ones become dense."""
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def _arguments(kind: type) -> set[str]:
    makers = (base.__init__ for base in kind.__mro__ if "__init__" in vars(base))  # type: ignore[misc]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_data(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return isinstance(value, (*_PLAIN, NDArray, np.ndarray))


def equal(a: Any, b: Any) -> bool:
    """Return whether two nestings of dicts, lists, arrays and plain data are equal."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


class FromUpdate(mx.lr_scheduler.LRScheduler):
    """A schedule that counts from update ``start`` on, with the attributes of ``schedule``."""

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
    """Return a schedule as the user constructed it, and the update from which it counts."""
    return (schedule.schedule, schedule.start) if isinstance(schedule, FromUpdate) else (schedule, 0)


def describe(schedule: Any) -> Any:
    """Return class names and plain attributes of a schedule and of what is in it, as plain data."""
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
    """Return the class names in what ``describe`` found, nested as the schedules are."""
    if isinstance(described, dict):
        inner = {k: class_names(v) for k, v in described["attrs"].items()}
        return [described["class"], *(v for v in inner.values() if v)]
    if isinstance(described, list):
        return [k for k in map(class_names, described) if k]
    return None


def restore_schedule(optimizer: mx.optimizer.Optimizer, described: Any, start: int) -> None:
    """Continue from the state of a schedule of the same kind that counted from update ``start``."""
    schedule, _ = without_start(optimizer.lr_scheduler)
    _set_attributes(schedule, described)
    optimizer.lr_scheduler = FromUpdate(schedule, start) if schedule is not None and start else schedule


def continue_schedule(optimizer: mx.optimizer.Optimizer, mine: Any, saved: list, start: int) -> None:
    """Continue the caller's schedule, described as ``mine``, from the file's state if it is the same, or from now on.

    ``saved``: the file's, as its run constructed it and in its last state. Scripts for MXNet's Module construct the
    rest of a schedule for a resumed run, and Module counts from ``begin_num_update`` again.
    """
    if mine in saved:
        restore_schedule(optimizer, saved[-1], start)
    else:
        restore_schedule(optimizer, mine, optimizer.num_update - optimizer.begin_num_update)


def _set_attributes(schedule: Any, described: Any) -> None:
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
