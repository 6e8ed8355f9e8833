"""The states of an optimizer, of its masters and of the loss scale: collected, saved, and continued from."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet, state_file
from .masters import Weight
from .resume import (
    AsMade,
    class_names,
    continue_schedule,
    describe,
    equal,
    restore_schedule,
    savable_attributes,
    to_host,
    without_start,
)
from .state_layout import Layout, check_shapes, check_states, for_weight, map_leaves, with_attributes
from .step import ScaledStep
from .updater import Updaters

__all__ = ["OptimizerStates", "load", "read", "save"]


class OptimizerStates(NamedTuple):
    """The content of a file; arrays are NumPy's."""

    step: dict | None  # ScaledStep.state_dict(); None in a file of MXNet's
    optimizer: str | None  # class name; None in a file of MXNet's Module, which holds states only
    progress: dict  # attributes of the optimizer: update counts, hyper-parameters, what it accumulates
    scheduler: Any  # None or class name and attributes of the learning-rate schedule
    states: dict  # of the updater by index, as for FP32 weights
    masters: dict  # FP32, by index
    shapes: list | None  # of every parameter
    accumulated: list | None = None  # names in ``progress`` that every resumed run continues from; None: not known
    scheduler_as_made: Any = None  # as ``scheduler``, before the first update
    scheduler_start: int = 0  # the update from which the schedule counts


def save(path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight]) -> None:
    """Write the states of one device (all devices hold the same), completely or not at all. Synchronizes."""
    masters = {i: to_host(weight.masters[0]) for i, weight in enumerate(weights) if weight.masters}
    found = _collect(updaters.optimizer, updaters[0].states)
    found = found._replace(
        step=step.state_dict(),
        masters={**found.masters, **masters},
        shapes=[tuple(weight.shape or ()) for weight in weights],
        accumulated=updaters.as_made.accumulated(updaters.optimizer),
        scheduler_as_made=updaters.as_made.schedule,
    )
    state_file.write(path, found._asdict())


def load(
    path: str,
    step: ScaledStep,
    updaters: Updaters,
    weights: Sequence[Weight],
    contexts: Sequence[mx.Context],
    *,
    settings: str = "file",
) -> None:
    """Continue from ``save``, or from the file of MXNet's ``gluon.Trainer``, on any number of devices.

    Masters in the file set the weights, in whatever dtype those are stored. Runs no code from the file.

    Parameters
    ----------
    settings : {"file", "caller"}
        Whether hyper-parameters and schedule are the file's or the caller's. ``"caller"`` also reads the file of
        MXNet's ``Module``, which has no counts: those stay ``begin_num_update``.

    Raises
    ------
    ValueError
        The file is damaged, or of other parameters or another optimizer; nothing has changed.
    """
    found = read(path)
    if found.optimizer is None:
        if settings == "file":
            raise ValueError(f"{path!r} is of a plain Module and holds no optimizer; mxmp.Module reads it")
        found = _of_module(found.states, updaters.optimizer, weights)
    commit = _check(found, updaters, [tuple(weight.shape or ()) for weight in weights], contexts, settings)
    if found.step is not None:
        step.load_state_dict(found.step)
    commit()
    for index, master in found.masters.items():
        weights[index].assign(mx.nd.array(master))
    fitting = {i: _state_for(updaters.optimizer, found, i, weights[i]) for i in found.states}
    updaters.set_states(fitting, contexts, _to_device)


def read(path: str) -> OptimizerStates:
    """Read our file, or one that an updater of MXNet's wrote, with its optimizer in it or without.

    Raises
    ------
    ValueError
        The file is truncated, tampered with, or of another kind.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        if content.startswith(b"PK"):
            return OptimizerStates(**state_file.read(content))
        states, optimizer = state_file.read_pickle(content)
        if optimizer is not None:
            return _collect(optimizer, states)
        map_leaves(_check_array, states)
        return OptimizerStates(None, None, {}, None, states, {}, None)
    except Exception as error:
        raise ValueError(
            f"{path!r} is no states file of mxmp, of a gluon.Trainer or of a Module, or it was truncated or changed "
            f"({error}); nothing was loaded"
        ) from error


def _collect(optimizer: mx.optimizer.Optimizer, states: dict) -> OptimizerStates:
    """Return an optimizer's data and its states of one device as host arrays. Synchronizes.

    Masters that ``multi_precision`` keeps inside a state are taken out, so that all states are those of an FP32
    weight.
    """
    schedule, start = without_start(optimizer.lr_scheduler)
    layout = Layout(optimizer)
    apart = {index: layout.split(state) for index, state in states.items()}
    return OptimizerStates(
        None,
        type(optimizer).__name__,
        to_host(savable_attributes(optimizer)),
        describe(schedule),
        {index: map_leaves(_in_float32, to_host(state)) for index, (state, _) in apart.items()},
        to_host({index: master for index, (_, master) in apart.items() if master is not None}),
        None,
        scheduler_start=start,
    )


def _of_module(states: dict, optimizer: mx.optimizer.Optimizer, weights: Sequence[Weight]) -> OptimizerStates:
    """Return what MXNet's ``Module`` wrote, which numbers weight ``i`` on device ``k`` of ``n`` as ``i * n + k``.

    Where its kvstore updated, the keys are names. ``n`` is not in the file; the states of all devices are equal.
    """
    names = {weight.name: i for i, weight in enumerate(weights)}
    states = {names.get(key, key): to_host(state) for key, state in states.items()}
    if not all(isinstance(key, int) for key in states):
        raise ValueError(f"the states are of other parameters: {next(k for k in states if isinstance(k, str))!r}")

    def copies_are_equal(count: int) -> bool:
        blocks = {key - key % count for key in states}
        return max(blocks, default=0) < count * len(weights) and all(
            first + k in states and equal(states[first], states[first + k]) for first in blocks for k in range(count)
        )

    count = next((n for n in range(len(states), 0, -1) if copies_are_equal(n)), 1)
    mine = {key // count: state for key, state in states.items() if key % count == 0}
    # A pair may be Adam's or SGD's with a float16 weight's master, so it is not taken apart.
    return OptimizerStates(None, type(optimizer).__name__, {}, None, mine, {}, None)


def _check(
    found: OptimizerStates, updaters: Updaters, shapes: Sequence[tuple], contexts: Sequence[mx.Context], settings: str
) -> Callable[[], None]:
    """Check that ``found`` fits, and return a function that sets the optimizer's attributes.

    Update counts are replicated to all devices (MXNet restores the saved ones only, and Adam on the others then
    diverges). A dimension of ``shapes`` that is not known yet is 0.
    """
    optimizer, as_made = updaters.optimizer, updaters.as_made
    if found.optimizer != type(optimizer).__name__:
        raise ValueError(f"the states are of optimizer {found.optimizer}, this one is {type(optimizer).__name__}")
    if found.shapes is not None:
        check_shapes(found.shapes, shapes)
    progress = {k: v for k, v in found.progress.items() if k in savable_attributes(optimizer)}
    if settings == "caller":
        accumulated = found.accumulated
        if accumulated is None:  # a gluon.Trainer's file does not hold the optimizer as it was constructed
            accumulated = AsMade({}, None).accumulated(optimizer)
        progress = {k: v for k, v in progress.items() if k in accumulated}
    else:
        own = class_names(describe(without_start(optimizer.lr_scheduler)[0]))
        if class_names(found.scheduler) != own:
            raise ValueError(
                f"the states were saved with the learning-rate schedule {class_names(found.scheduler)}, this optimizer "
                f"has {own}"
            )
    check_states(found.states, found.masters, with_attributes(optimizer, progress), shapes)

    def commit() -> None:
        for name, value in progress.items():
            setattr(optimizer, name, _to_device(value, contexts[0]))
        _mxnet.replicate_update_counts(optimizer, contexts)
        if settings == "file":
            restore_schedule(optimizer, found.scheduler, found.scheduler_start)
        elif progress:
            # A gluon.Trainer's file does not say how its schedule began.
            before = [found.scheduler] if found.accumulated is None else [found.scheduler_as_made, found.scheduler]
            continue_schedule(optimizer, as_made.schedule, before, found.scheduler_start)

    return commit


def _state_for(optimizer: mx.optimizer.Optimizer, found: OptimizerStates, index: int, weight: Weight) -> Any:
    """Return a state for the array that the updater will pass to the optimizer."""
    if weight.masters or not weight.arrays:
        return found.states[index]
    array = weight.arrays[0]
    master = found.masters.get(index)
    if master is None and array.dtype == np.float16:
        master = array.asnumpy().astype(np.float32)
    return for_weight(optimizer, found.states[index], master, array.dtype)


def _check_array(leaf: Any) -> None:
    if not isinstance(leaf, (NDArray, type(None))):
        raise TypeError(f"it holds a {type(leaf).__name__}, no array")


def _in_float32(leaf: Any) -> Any:
    return leaf.astype(np.float32) if isinstance(leaf, np.ndarray) and leaf.dtype == np.float16 else leaf


def _to_device(value: Any, ctx: mx.Context) -> Any:
    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)
