"""The states of an optimizer, of its masters and of the loss scale: collected, saved, and continued from."""

from __future__ import annotations

from typing import Any, Callable, Collection, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet, state_file
from .masters import Weight
from .resume import AsMade, continue_schedule, describe, equal, kinds, own_data, restore_schedule, to_host, whole
from .state_layout import Layout, agree, check_states, difference, for_weight, map_leaves, with_attributes
from .step import ScaledStep
from .updater import Updaters

__all__ = ["OptimizerStates", "collect", "load", "read", "save"]


class OptimizerStates(NamedTuple):
    """What a file holds.

    Attributes
    ----------
    step : dict or None
        ``ScaledStep.state_dict()``; None in a file of plain MXNet.
    optimizer : str or None
        Class name; None in a file of a plain ``Module``, which holds states only.
    progress : dict
        Attributes of the optimizer: update counts, hyper-parameters, what it accumulates.
    scheduler : Any
        ``None`` or class name and attributes of the learning-rate schedule.
    states : dict
        Updater states by index, with ``numpy.ndarray`` leaves.
    masters : dict
        FP32 masters by index, ``numpy.ndarray``.
    shapes : list of tuple, or None
        Shape of every parameter.
    accumulated : list of str or None
        Names in ``progress`` that a run continues from whatever its hyper-parameters are; None: not known.
    scheduler_as_made : Any
        As ``scheduler``, before the first update.
    scheduler_start : int
        The update from which the schedule counts.
    """

    step: dict | None
    optimizer: str | None
    progress: dict
    scheduler: Any
    states: dict
    masters: dict
    shapes: list | None
    accumulated: list | None = None
    scheduler_as_made: Any = None
    scheduler_start: int = 0


def save(path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight]) -> None:
    """Write the states of one device (all devices hold the same), whole or not at all. Synchronizes."""
    masters = {i: weight.masters[0] for i, weight in enumerate(weights) if weight.masters}
    shapes = [weight.shape for weight in weights]
    found = collect(step.state_dict(), updaters.optimizer, updaters[0].states, masters, shapes)
    as_made = updaters.as_made
    found = found._replace(accumulated=as_made.accumulated(updaters.optimizer), scheduler_as_made=as_made.schedule)
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
    """Continue from ``save``, or from the file of a plain ``gluon.Trainer``, on any number of devices.

    Masters in the file set the weights, whatever those are stored in. Runs no code from the file.

    Parameters
    ----------
    settings : {"file", "caller"}
        Whose hyper-parameters and schedule hold. ``"caller"`` also reads the file of a plain ``Module``, which
        has no counts: those stay ``begin_num_update``.

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
    commit = _check(found, updaters, [weight.shape for weight in weights], contexts, settings)
    if found.step is not None:
        step.load_state_dict(found.step)
    commit()
    for index, master in found.masters.items():
        weights[index].assign(mx.nd.array(master))
    fitting = {i: _fitting(updaters.optimizer, found, i, weights[i]) for i in found.states}
    updaters.set_states(fitting, contexts, _to_device)


def _of_module(states: dict, optimizer: mx.optimizer.Optimizer, weights: Sequence[Weight]) -> OptimizerStates:
    """What a plain ``Module`` wrote, which numbers weight ``i`` on device ``k`` of ``n`` as ``i * n + k``.

    Where its kvstore updated, the keys are names. ``n`` is not in the file; the states of all devices are equal.
    """
    names = {weight.name: i for i, weight in enumerate(weights)}
    states = {names.get(key, key): to_host(state) for key, state in states.items()}
    if not all(isinstance(key, int) for key in states):
        raise ValueError(f"the states are of other parameters: {next(k for k in states if isinstance(k, str))!r}")

    def by_device(count: int) -> bool:
        blocks = {key - key % count for key in states}
        return max(blocks, default=0) < count * len(weights) and all(
            first + k in states and equal(states[first], states[first + k]) for first in blocks for k in range(count)
        )

    count = next((n for n in range(len(states), 0, -1) if by_device(n)), 1)
    mine = {key // count: state for key, state in states.items() if key % count == 0}
    # A pair may be Adam's or SGD's with a float16 weight's master, so it is not taken apart.
    return OptimizerStates(None, type(optimizer).__name__, {}, None, mine, {}, None)


def _fitting(optimizer: mx.optimizer.Optimizer, found: OptimizerStates, index: int, weight: Weight) -> Any:
    """A state for the array that the updater will hand to the optimizer."""
    if weight.masters or not weight.arrays:
        return found.states[index]
    array = weight.arrays[0]
    master = found.masters.get(index)
    if master is None and array.dtype == np.float16:
        master = array.asnumpy().astype(np.float32)
    return for_weight(optimizer, found.states[index], master, array.dtype)


def collect(
    step: dict | None, optimizer: mx.optimizer.Optimizer, states: dict, masters: dict, shapes: Sequence[tuple]
) -> OptimizerStates:
    """The states of one device (all devices hold the same) as host arrays. Synchronizes.

    Masters that ``multi_precision`` keeps inside a state are taken out, so that all states are those of
    an FP32 weight.
    """
    schedule, start = whole(optimizer.lr_scheduler)
    layout = Layout(optimizer)
    apart = {index: layout.split(state) for index, state in states.items()}
    inner = {index: master for index, (_, master) in apart.items() if master is not None}
    return OptimizerStates(
        step,
        type(optimizer).__name__,
        to_host(own_data(optimizer)),
        describe(schedule),
        {index: map_leaves(_full, to_host(state)) for index, (state, _) in apart.items()},
        to_host({**inner, **masters}),
        [tuple(shape or ()) for shape in shapes],
        scheduler_start=start,
    )


def read(path: str) -> OptimizerStates:
    """Read our file, or one that a plain MXNet updater wrote, with its optimizer in it or without.

    Raises
    ------
    ValueError
        The file is truncated, tampered with, or of another kind.
    """
    with open(path, "rb") as file:
        content = file.read()
    if content.startswith(b"PK"):
        try:
            return OptimizerStates(**state_file.read(path, content))
        except TypeError as error:
            raise ValueError(f"{path!r} is no states file of mxmp ({error}); nothing was loaded") from error
    try:
        states, optimizer = state_file.read_pickle(content)
        if optimizer is None:
            _check_arrays(states)
            return OptimizerStates(None, None, {}, None, states, {}, None)
        found = collect(None, optimizer, states, {}, [])
    except Exception as error:
        raise ValueError(
            f"{path!r} is no states file of mxmp, of a gluon.Trainer or of a Module, or it was truncated or changed "
            f"({error}); nothing was loaded"
        ) from error
    return found._replace(shapes=None)


def _check(
    found: OptimizerStates, updaters: Updaters, shapes: Sequence[tuple], contexts: Sequence[mx.Context], settings: str
) -> Callable[[], None]:
    """Check that ``found`` fits, and return what sets the optimizer's progress.

    Update counts are replicated to all devices (MXNet restores the saved ones only, and Adam on the
    others then diverges). A dimension of ``shapes`` that is not known yet is 0.
    """
    optimizer = updaters.optimizer
    if found.optimizer != type(optimizer).__name__:
        raise ValueError(f"the states are of optimizer {found.optimizer}, this one is {type(optimizer).__name__}")
    own_shapes = [tuple(shape or ()) for shape in shapes]
    if found.shapes is not None:
        pairs = list(zip(found.shapes, own_shapes))
        if len(found.shapes) != len(own_shapes) or not all(agree(a, b) for a, b in pairs):
            raise ValueError(f"the states are of other parameters: {difference(found.shapes, own_shapes)}")
    progress = {k: v for k, v in found.progress.items() if k in own_data(optimizer)}
    if settings == "caller":
        progress = {k: v for k, v in progress.items() if k in _accumulated(found, optimizer)}
    else:
        own = describe(whole(optimizer.lr_scheduler)[0])
        if kinds(found.scheduler) != kinds(own):
            raise ValueError(
                f"the states were saved with the learning-rate schedule {kinds(found.scheduler)}, this optimizer "
                f"has {kinds(own)}"
            )
    check_states(found.states, found.masters, with_attributes(optimizer, progress), own_shapes)

    def commit() -> None:
        for name, value in progress.items():
            setattr(optimizer, name, _to_device(value, contexts[0]))
        _mxnet.replicate_update_counts(optimizer, contexts)
        if settings == "file":
            restore_schedule(optimizer, found.scheduler, found.scheduler_start)
        elif progress:
            # A gluon.Trainer's file does not say how its schedule began.
            saved = [found.scheduler] if found.accumulated is None else [found.scheduler_as_made, found.scheduler]
            continue_schedule(optimizer, updaters.as_made.schedule, saved, found.scheduler_start)

    return commit


def _accumulated(found: OptimizerStates, optimizer: mx.optimizer.Optimizer) -> Collection[str]:
    return found.accumulated if found.accumulated is not None else AsMade({}, None).accumulated(optimizer)


def _check_arrays(states: dict) -> None:
    def check(leaf: Any) -> None:
        if not isinstance(leaf, (NDArray, type(None))):
            raise TypeError(f"it holds a {type(leaf).__name__}, no array")

    map_leaves(check, states)


def _full(leaf: Any) -> Any:
    return leaf.astype(np.float32) if isinstance(leaf, np.ndarray) and leaf.dtype == np.float16 else leaf


def _to_device(value: Any, ctx: mx.Context) -> Any:
    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)
