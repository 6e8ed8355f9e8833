"""The states of an optimizer, of its masters and of the loss scale: collected, saved, and continued from."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet, state_file
from .fingerprint import fingerprint, watch_weights
from .masters import Weight
from .resume import (
    InitialOptimizer,
    class_names,
    continue_schedule,
    describe,
    equal,
    is_data,
    restore_schedule,
    savable_attributes,
    to_host,
    without_start,
)
from .state_layout import Layout, check_shapes, check_states, for_half, map_leaves, positions, with_attributes
from .step import ScaledStep
from .updater import Updaters


class OptimizerStates(NamedTuple):
    """The content of a states file: optimizer, scaler and master weights, with NumPy arrays in place of NDArrays.

    Attributes
    ----------
    step : dict or None
        Scaler and step counters, from ``ScaledStep.state_dict``; None in a file that MXNet wrote.
    optimizer : str or None
        Class name of the optimizer (``"Adam"``); None in a file that holds states only, as MXNet's Module writes it.
    progress : dict
        The optimizer's attributes by name: update counts, hyper-parameters, and other values that updates change
        (``"m_schedule"`` of Nadam).
    scheduler : object
        The learning-rate schedule when it was saved, as plain data from ``describe``; None without one.
    states : dict
        From a parameter's index to the optimizer's state for it, in the form for an FP32 weight. ``read`` returns the
        dict in a file of states only as it is: NDArrays, by the Updater's own numbers or by parameters' names.
    masters : dict
        From the index of each parameter that was stored in float16 to its FP32 master weights.
    shapes : list or None
        The shape of every parameter, in the order of indices; None in a file that MXNet wrote.
    accumulated : list or None
        The names in ``progress`` that updates have changed, from which every resumed run continues. The others are
        settings, which the caller may choose anew. None in a file that MXNet wrote.
    scheduler_as_made : object
        ``scheduler`` before its first update; None in a file that MXNet wrote.
    scheduler_start : int
        The number of the update at which the schedule started; above 0 if a resumed run began a new schedule.
    names : list or None
        The name of every parameter, in the order of indices; None in a file that MXNet wrote.
    fingerprint : numpy.ndarray or None
        A few values of every parameter, in the order of indices; None in a file that MXNet or an earlier mxmp wrote.
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
    names: list | None = None
    fingerprint: np.ndarray | None = None


def save(path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight]) -> None:
    """Write optimizer states, master weights, scaler and counters to the file ``path``, completely or not at all.

    ``step`` has the scaler and the counters of steps. Of ``updaters`` the states of the first device are saved, as all
    devices hold the same. ``weights`` are all parameters, in the order of their indices. Waits for the device. Raises
    ``TypeError`` for an optimizer's state that a file cannot hold, and ``OSError`` if the file cannot be written.
    """
    masters = {i: to_host(weight.masters[0]) for i, weight in enumerate(weights) if weight.masters}
    found = _collect(updaters.optimizer, updaters[0].states)
    found = found._replace(
        step=step.state_dict(),
        masters={**found.masters, **masters},
        shapes=[tuple(weight.shape or ()) for weight in weights],
        accumulated=updaters.initial.accumulated(updaters.optimizer),
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
    settings: str = "file",
    names_identify: bool = False,
    only_check: bool = False,
) -> None:
    """Continue from a file of ``save``, or of MXNet's Trainer, Module or Updater; the number of devices may differ.

    FP32 master weights in the file become the values of a Gluon net's parameters, whatever dtype these have now. In a
    Module this holds only for the parameters that have masters now. Logs a warning if the file was saved with other
    weights than the present ones, or those at the next step. Runs no code from the file.

    Parameters
    ----------
    path : str
    step, updaters
        These are changed: ``step`` gets loss scale and counts of steps, unless the file is MXNet's, and ``updaters``
        the optimizer's attributes and states.
    weights : callable
        Returns all parameters, in the order of their indices.
    contexts : sequence of mx.Context
        The device of each Updater.
    settings : {"file", "caller"}
        Whether hyper-parameters and learning-rate schedule are taken from the file, or stay as the caller set them.
        With ``"caller"``, a schedule that equals the file's continues where that was saved; any other starts at the
        saved update count. A schedule is equal if its class and attributes, before this run's first update, are those
        of the file's schedule, either before that one's first update or when it was saved. A file that holds states
        only, as MXNet's ``Module`` and ``Updater.get_states()`` write it, leaves all else as it is.
    names_identify : bool
        How saved parameters are matched with ``weights``. True, for a Module, whose weights are saved by name: by equal
        names, in any order, if the file has just the names of ``weights``. Otherwise, and with False, ``positions``
        pairs names that differ only in the numbers that Gluon gives to a net that is built again. A file that MXNet's
        Trainer wrote has no names: its indices are those of ``weights``.
    only_check : bool
        True: raise the errors, and change nothing.

    Raises
    ------
    ValueError
        The file is damaged, or is of other parameters or of another optimizer. With ``settings="file"`` also: its
        schedule is of another class. In each case nothing has changed.
    OSError
        The file cannot be read.
    """
    found, present = read(path), weights()
    if found.optimizer is None:
        found = _without_optimizer(found.states, updaters.optimizer, present, of_trainer=settings == "file")
    shapes = [tuple(weight.shape or ()) for weight in present]
    found = _in_order_of(found, [weight.name for weight in present], shapes, names_identify)
    commit = _check(found, updaters, shapes, contexts, settings)
    if only_check:
        return
    watch_weights(step.observers, found.fingerprint, weights, path)
    if found.step is not None:
        step.load_state_dict(found.step)
    commit()
    for index, master in found.masters.items():
        present[index].assign(mx.nd.array(master))
    fitting = {i: _state_for(updaters.optimizer, found, i, present[i]) for i in found.states}
    updaters.set_states(fitting, contexts, _to_device)


def read(path: str) -> OptimizerStates:
    """Return the content of a states file: one that ``save`` wrote, or that MXNet's gluon.Trainer or Module wrote.

    Raises
    ------
    ValueError
        The file is truncated, was changed, or is of another kind.
    OSError
        The file cannot be read.
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
    """Return an OptimizerStates with the optimizer's attributes, schedule and states, copied to the host.

    ``states`` is the dict of that name in MXNet's Updater. The result's fields for the scaler, the parameters and the
    optimizer as it was made are None. FP32 masters that MXNet's ``multi_precision`` keeps inside a state go to the
    result's ``masters``, and float16 states become FP32, so that all states are those of FP32 weights. Waits for the
    device. Raises ``TypeError`` for a state that a file cannot hold.
    """
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
    """Return an OptimizerStates with ``states`` from a file without an optimizer, by parameters' indices.

    ``Updater.get_states`` writes one device's states. A gluon.Trainer numbers them as the parameters, a Module on ``n``
    devices by ``i * n + k`` for weight ``i`` on device ``k``; and where a kvstore updated a Module's weights, their
    names are the keys. The file does not say ``n``: the largest number is taken for which the states are the same on
    all ``n`` devices, or 1 for a Trainer (``of_trainer``), if it has so many parameters. The result has the class name
    of ``optimizer`` and these states only. Raises ``ValueError`` for a name that no parameter has.
    """
    names = {weight.name: i for i, weight in enumerate(weights)}
    is_by_name = any(isinstance(key, str) for key in states)
    states = {names.get(key, key): to_host(state) for key, state in states.items()}
    if not all(isinstance(key, int) for key in states):
        raise ValueError(f"the states are of other parameters: {next(k for k in states if isinstance(k, str))!r}")

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
    """Return the content of a file with its indices changed to those of the present parameters.

    ``names`` and ``shapes`` are the present parameters', in the order of their indices; ``load`` explains
    ``names_identify``. Returns ``found`` as it is if it has no names or another number of parameters. Raises
    ``ValueError`` for names that do not fit.
    """
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
    """Raise ``ValueError`` if a loaded file does not fit; return a function that sets up the optimizer from the file.

    That function sets the optimizer's attributes and schedule, and gives every device the saved update counts; it sets
    no states or masters. ``load``, whose docstring explains ``settings``, calls it when everything is checked, so an
    error changes nothing. ``shapes`` are those of the present parameters, in the order of their indices.
    """
    optimizer, initial = updaters.optimizer, updaters.initial
    if found.optimizer != type(optimizer).__name__:
        raise ValueError(f"the states are of optimizer {found.optimizer}, this one is {type(optimizer).__name__}")
    if found.shapes is not None:
        check_shapes(found.shapes, shapes)
    progress = {k: v for k, v in found.progress.items() if k in savable_attributes(optimizer)}
    if settings == "caller":
        accumulated = found.accumulated
        if accumulated is None:  # the file of MXNet's gluon.Trainer does not hold the optimizer as it was made
            accumulated = InitialOptimizer({}, None).accumulated(optimizer)
        progress = {k: v for k, v in progress.items() if k in accumulated}
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

    return commit


def _state_for(optimizer: mx.optimizer.Optimizer, found: OptimizerStates, index: int, weight: Weight) -> Any:
    """Return the saved state of the parameter ``index`` in the form in which the optimizer expects it for ``weight``.

    The saved state is that of an FP32 weight. It is returned as it is, unless ``weight`` is stored in float16 without
    masters. Then, if the optimizer uses ``multi_precision``, the state and an FP32 master are combined: the file's
    master or, if the file has none, the present weight in FP32. Without ``multi_precision``, the state's arrays become
    float16.
    """
    if not _is_half_alone(weight):
        return found.states[index]
    master = found.masters.get(index)
    if master is None:
        master = weight.arrays[0].asnumpy().astype(np.float32)
    return for_half(optimizer, found.states[index], master)


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
    """Return a copy of nested dicts, lists and tuples, in which NDArrays on ``ctx`` replace NumPy arrays."""

    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)
