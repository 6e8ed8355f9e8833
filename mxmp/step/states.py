"""The states of an optimizer, of its masters and of the loss scale: collected, saved, and continued from."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet, state_file
from .fingerprint import fingerprint, watch_weights
from .masters import Weight
from .optimizer_data import InitialOptimizer, describe, is_data, map_leaves, savable_attributes, to_host, without_start
from .resume import accumulated, class_names, continue_schedule, equal, restore_schedule
from .state_layout import Layout, check_shapes, check_states, positions, with_attributes
from .step import ScaledStep
from .updater import Updaters


class OptimizerStates(NamedTuple):
    """The content of a states file: optimizer, scaler and master weights, with NumPy arrays in place of NDArrays.
    A file that MXNet wrote has None in ``step``, ``shapes`` and in all fields with defaults but ``scheduler_start``."""

    step: dict | None  # scaler and step counters, from ``ScaledStep.state_dict``
    optimizer: str | None  # class name; None in a file with states only, as MXNet's Module writes it
    progress: dict  # the optimizer's attributes: update counts, hyper-parameters, accumulated values
    scheduler: Any  # the learning-rate schedule when it was saved, from ``describe``
    # From a parameter's index to its state, in the form for an FP32 weight. ``read`` returns that of a file with states
    # only as it is: NDArrays, by the Updater's numbers or by names.
    states: dict
    masters: dict  # FP32 values, by index, of parameters that were stored in float16
    shapes: list | None  # of every parameter, in the order of indices
    accumulated: list | None = None  # names in ``progress`` that updates have changed, not settings
    scheduler_as_made: Any = None  # ``scheduler`` before its first update
    scheduler_start: int = 0  # the update at which it started; above 0 if a resumed run began it
    names: list | None = None  # of every parameter, in the order of indices
    fingerprint: np.ndarray | None = None  # a few values of every parameter, as ``fingerprint`` returns


def save(path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight]) -> None:
    """Write optimizer states, masters, scaler and counters, completely or not at all. Waits for the device."""
    masters = {i: to_host(weight.masters[0]) for i, weight in enumerate(weights) if weight.masters}
    found = _collect(updaters.optimizer, updaters[0].states)  # all devices hold the same
    found = found._replace(
        step=step.state_dict(),
        masters={**found.masters, **masters},
        shapes=[weight.shape for weight in weights],
        accumulated=accumulated(updaters.initial, updaters.optimizer),
        scheduler_as_made=updaters.initial.schedule,
        names=[weight.name for weight in weights],
        fingerprint=fingerprint(weights),
    )
    state_file.write(path, found._asdict())


def load(
    path: str,
    step: ScaledStep,
    updaters: Updaters,
    weights: Callable[[], Sequence[Weight]],
    contexts: Sequence[mx.Context],
    *,
    settings: str = "file",  # "caller": hyper-parameters and schedule stay as the caller set them
    names_identify: bool = False,  # match by equal names, as a Module's, not by ``positions``
    only_check: bool = False,
) -> None:
    """Continue from a file of ``save``, or of MXNet's Trainer, Module or Updater; the number of devices may differ.
    Raises ``ValueError`` if the file is damaged, or of other parameters, or of another optimizer, and with
    ``settings="file"`` of another class of schedule; ``OSError`` if it cannot be read. Nothing has changed then."""
    found, present = read(path), weights()
    if found.optimizer is None:
        found = _without_optimizer(found.states, updaters.optimizer, present, of_trainer=settings == "file")
    shapes = [weight.shape for weight in present]
    found = _in_order_of(found, [weight.name for weight in present], shapes, names_identify)
    commit = _check(found, updaters, shapes, contexts, settings)
    if only_check:
        return
    watch_weights(step.observers, found.fingerprint, weights, path)
    if found.step is not None:
        step.load_state_dict(found.step)
    commit()
    # A Gluon net's parameters take them whatever dtype they have now, a Module's only where they have masters.
    for index, master in found.masters.items():
        present[index].assign(mx.nd.array(master))
    fitting = {i: _state_for(updaters.optimizer, found, i, present[i]) for i in found.states}
    updaters.set_states(fitting, contexts, _to_device)


def read(path: str) -> OptimizerStates:
    """Return the content of a states file of mxmp or MXNet; ``ValueError`` if it is damaged or is of another kind."""
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
    """Return the optimizer's attributes, schedule and states, copied to the host. Waits for the device.
    All states are those of FP32 weights: ``multi_precision``'s masters are apart, and float16 states become FP32."""
    map_leaves(_check_leaf, states)
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


def _without_optimizer(
    states: dict, optimizer: mx.optimizer.Optimizer, weights: Sequence[Weight], *, of_trainer: bool
) -> OptimizerStates:
    """Return one device's states, as ``Updater.get_states`` writes them, by parameters' indices."""
    names = {weight.name: i for i, weight in enumerate(weights)}
    is_by_name = any(isinstance(key, str) for key in states)
    states = {names.get(key, key): to_host(state) for key, state in states.items()}
    if not all(isinstance(key, int) for key in states):
        raise ValueError(f"the states are of other parameters: {next(k for k in states if isinstance(k, str))!r}")

    # A gluon.Trainer numbers states as the parameters, a Module on n devices by ``i * n + k`` for weight i on device k,
    # and a kvstore by names. The file does not say n: take the largest for which states are the same on all n devices.
    def copies_are_equal(count: int) -> bool:
        blocks = {key - key % count for key in states}
        return max(blocks, default=0) < count * len(weights) and all(
            first + k in states and equal(states[first], states[first + k]) for first in blocks for k in range(count)
        )

    count = 1
    if not is_by_name and not (of_trainer and max(states, default=0) < len(weights)):
        count = next((n for n in range(len(states), 0, -1) if copies_are_equal(n)), 1)
    found = OptimizerStates(None, type(optimizer).__name__, {}, None, {}, {}, None)
    layout = Layout(optimizer)
    for key, state in states.items():
        index = key // count
        if key % count == 0:
            # A pair may be Adam's two moments, or momentum and FP32 master: only what updates itself divides it.
            pairs = optimizer.multi_precision and index < len(weights) and _is_half_alone(weights[index])
            found.states[index], master = layout.split(state) if pairs else (state, None)
            if master is not None:
                found.masters[index] = master
    return found


def _in_order_of(
    found: OptimizerStates, names: Sequence[str], shapes: Sequence[tuple], names_identify: bool
) -> OptimizerStates:
    """Return the content with the indices of the present parameters; ``ValueError`` if names do not fit."""
    if found.names is None or found.shapes is None or len(found.names) != len(names):
        return found
    if names_identify and set(found.names) == set(names):
        here = [names.index(name) for name in found.names]
    else:
        here = positions(found.names, names, found.shapes, shapes)
    moved: dict[Any, Any] = {**dict(enumerate(here)), **dict(zip(found.names, (names[k] for k in here)))}

    def rekeyed(value: Any) -> Any:
        # The optimizer's update counts, and what LBSGD has accumulated, are by index; multipliers may be by name.
        return {moved.get(k, k): rekeyed(v) for k, v in value.items()} if isinstance(value, dict) else value

    return found._replace(
        progress={name: rekeyed(value) for name, value in found.progress.items()},
        states={moved.get(i, i): state for i, state in found.states.items()},  # _check refuses a wrong index
        masters={moved.get(i, i): master for i, master in found.masters.items()},
        shapes=[shape for _, shape in sorted(zip(here, found.shapes))],
        names=list(names),
        fingerprint=None if found.fingerprint is None else found.fingerprint[np.argsort(here)],
    )


def _check(
    found: OptimizerStates, updaters: Updaters, shapes: Sequence[tuple], contexts: Sequence[mx.Context], settings: str
) -> Callable[[], None]:
    """Raise ``ValueError`` if a file does not fit; return a function that sets up the optimizer from it."""
    optimizer, initial = updaters.optimizer, updaters.initial
    if found.optimizer != type(optimizer).__name__:
        raise ValueError(f"the states are of optimizer {found.optimizer}, this one is {type(optimizer).__name__}")
    if found.shapes is not None:
        check_shapes(found.shapes, shapes)
    progress = {k: v for k, v in found.progress.items() if k in savable_attributes(optimizer)}
    if settings == "caller":
        # The file of MXNet's gluon.Trainer does not hold the optimizer as it was made.
        made = initial if found.accumulated is not None else InitialOptimizer({}, None)
        changed = {*(found.accumulated or ()), *accumulated(made, optimizer)}
        progress = {k: v for k, v in progress.items() if k in changed}
    elif found.progress:  # otherwise the file holds states only
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
        if settings == "file" and progress:
            restore_schedule(optimizer, found.scheduler, found.scheduler_start)
        elif progress:
            # The file of MXNet's gluon.Trainer does not hold the schedule as it was made.
            before = [found.scheduler] if found.accumulated is None else [found.scheduler_as_made, found.scheduler]
            continue_schedule(optimizer, initial.schedule, before, found.scheduler_start)

    # ``load`` calls it when everything is checked, so that an error changes nothing.
    return commit


def _state_for(optimizer: mx.optimizer.Optimizer, found: OptimizerStates, index: int, weight: Weight) -> Any:
    """Return a parameter's saved state, which is that of an FP32 weight, in the form that the optimizer expects."""
    state = found.states[index]
    if not _is_half_alone(weight):
        return state
    if not optimizer.multi_precision:
        return map_leaves(lambda leaf: leaf.astype(np.float16) if isinstance(leaf, np.ndarray) else leaf, state)
    master = found.masters.get(index)
    return Layout(optimizer).join(state, weight.arrays[0].asnumpy().astype(np.float32) if master is None else master)


def _is_half_alone(weight: Weight) -> bool:
    """Return whether a weight is float16 without masters: ``multi_precision`` keeps its FP32 value in the state."""
    return bool(weight.arrays) and not weight.masters and weight.arrays[0].dtype == np.float16


def _check_array(leaf: Any) -> None:
    if not isinstance(leaf, (NDArray, type(None))):
        raise TypeError(f"it holds a {type(leaf).__name__}, no array")


def _check_leaf(leaf: Any) -> None:
    # A NumPy array could be written, and would be an NDArray in the state that is read.
    if isinstance(leaf, np.ndarray) or not is_data(leaf):
        raise TypeError(
            f"the optimizer keeps a {type(leaf).__name__} in its state of a weight, which a states file cannot hold: "
            "use NDArrays, numbers and strings, in dicts, lists and tuples"
        )


def _in_float32(leaf: Any) -> Any:
    return leaf.astype(np.float32) if isinstance(leaf, np.ndarray) and leaf.dtype == np.float16 else leaf


def _to_device(value: Any, ctx: mx.Context) -> Any:
    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)
