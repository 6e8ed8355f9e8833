"""The parts of an optimizer that a resumed run takes from a file of states, and those that it takes from its caller.
``gluon.Trainer.load_states`` takes all of it from the file, ``mx.mod.Module`` only the states. mxmp's Module takes the
counters and what an optimizer has accumulated from the file, too.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from ..messages import keywords_of
from .optimizer_data import PLAIN, FromUpdate, InitialOptimizer, describe, savable_attributes, to_host, without_start

# Attributes in which MXNet's base class keeps arguments that have other names (``learning_rate`` is ``lr``).
_SETTINGS = {"lr", "lr_mult", "wd_mult"}
_COUNTS = {"num_update", "_index_update_count", "_all_index_update_counts"}


def accumulated(initial: InitialOptimizer, optimizer: mx.optimizer.Optimizer) -> list[str]:
    """Return the sorted names of the attributes that updates have changed, always with MXNet's update counts."""
    now = to_host(savable_attributes(optimizer))
    settings = _SETTINGS.union(keywords_of(type(optimizer)))
    changed = (k for k, v in now.items() if k not in initial.attributes or not equal(v, initial.attributes[k]))
    return sorted(_COUNTS | {name for name in changed if name not in settings})


def equal(a: Any, b: Any) -> bool:
    """Return whether nested data is equal: a list may equal a tuple, dtypes may differ, and NaN equals nothing."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


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
        elif isinstance(current, (*PLAIN, np.generic)) and isinstance(value, PLAIN):
            setattr(schedule, name, value)
