"""The states of an optimizer, of its masters and of the loss scale: collected, saved, and continued from."""

from __future__ import annotations

import copy
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet, state_file
from .masters import Weight
from .state_layout import Layout, agree, check_states, difference, for_weight, map_leaves, with_attributes
from .step import ScaledStep
from .updater import Updaters

__all__ = ["OptimizerStates", "collect", "load", "read", "save"]

# What belongs to the process or to the run's arguments, not to the optimizer's progress.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "lr_scheduler", "rescale_grad", "aggregate_num", "multi_precision"}
_PLAIN = (bool, int, float, str, type(None))


class OptimizerStates(NamedTuple):
    """What a file holds.

    Attributes
    ----------
    step : dict or None
        ``ScaledStep.state_dict()``; None in a file of a plain ``gluon.Trainer``.
    optimizer : str
        Class name.
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
    """

    step: dict | None
    optimizer: str
    progress: dict
    scheduler: Any
    states: dict
    masters: dict
    shapes: list | None


def save(path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight]) -> None:
    """Write the states of one device (all devices hold the same), whole or not at all. Synchronizes."""
    masters = {i: weight.masters[0] for i, weight in enumerate(weights) if weight.masters}
    shapes = [weight.shape for weight in weights]
    found = collect(step.state_dict(), updaters.optimizer, updaters[0].states, masters, shapes)
    state_file.write(path, found._asdict())


def load(
    path: str, step: ScaledStep, updaters: Updaters, weights: Sequence[Weight], contexts: Sequence[mx.Context]
) -> None:
    """Continue from ``save``, or from the file of a plain ``gluon.Trainer``, on any number of devices.

    Masters in the file set the weights, whatever those are stored in. Runs no code from the file.

    Raises
    ------
    ValueError
        The file is damaged, or of other parameters or another optimizer; nothing has changed.
    """
    found = read(path)
    commit = _check(found, updaters.optimizer, [weight.shape for weight in weights], contexts)
    if found.step is not None:
        step.load_state_dict(found.step)
    commit()
    for index, master in found.masters.items():
        weights[index].assign(mx.nd.array(master))
    fitting = {i: _fitting(updaters.optimizer, found, i, weights[i]) for i in found.states}
    updaters.set_states(fitting, contexts, _to_device)


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
    step: dict, optimizer: mx.optimizer.Optimizer, states: dict, masters: dict, shapes: Sequence[tuple]
) -> OptimizerStates:
    """The states of one device (all devices hold the same) as host arrays. Synchronizes.

    Masters that ``multi_precision`` keeps inside a state are taken out, so that all states are those of
    an FP32 weight.
    """
    own = {k: v for k, v in optimizer.__dict__.items() if k not in _NOT_STATE}
    layout = Layout(optimizer)
    apart = {index: layout.split(state) for index, state in states.items()}
    inner = {index: master for index, (_, master) in apart.items() if master is not None}
    return OptimizerStates(
        step,
        type(optimizer).__name__,
        {k: _to_host(v) for k, v in own.items() if _is_data(v)},
        _describe(optimizer.lr_scheduler),
        {index: map_leaves(_full, _to_host(state)) for index, (state, _) in apart.items()},
        {index: master.asnumpy() for index, master in {**inner, **masters}.items()},
        [tuple(shape or ()) for shape in shapes],
    )


def read(path: str) -> OptimizerStates:
    """Read our file, or the states file of a plain MXNet updater with its optimizer in it.

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
        found = collect({}, optimizer, states, {}, [])
    except Exception as error:
        raise ValueError(
            f"{path!r} is no states file of mxmp or of a gluon.Trainer, or it was truncated or changed ({error}); "
            "nothing was loaded"
        ) from error
    return found._replace(step=None, shapes=None)


def _check(
    found: OptimizerStates,
    optimizer: mx.optimizer.Optimizer,
    shapes: Sequence[tuple],
    contexts: Sequence[mx.Context],
) -> Callable[[], None]:
    """Check that ``found`` fits, and return what sets the optimizer's progress.

    Update counts are replicated to all devices (MXNet restores the saved ones only, and Adam on the
    others then diverges). A dimension of ``shapes`` that is not known yet is 0.
    """
    if found.optimizer != type(optimizer).__name__:
        raise ValueError(f"the states are of optimizer {found.optimizer}, this one is {type(optimizer).__name__}")
    own_shapes = [tuple(shape or ()) for shape in shapes]
    if found.shapes is not None:
        pairs = list(zip(found.shapes, own_shapes))
        if len(found.shapes) != len(own_shapes) or not all(agree(a, b) for a, b in pairs):
            raise ValueError(f"the states are of other parameters: {difference(found.shapes, own_shapes)}")
    own = _describe(optimizer.lr_scheduler)
    if _kinds(found.scheduler) != _kinds(own):
        raise ValueError(
            f"the states were saved with the learning-rate schedule {_kinds(found.scheduler)}, this optimizer "
            f"has {_kinds(own)}"
        )
    progress = {k: v for k, v in found.progress.items() if k in vars(optimizer) and k not in _NOT_STATE}
    check_states(found.states, found.masters, with_attributes(optimizer, progress), own_shapes)

    def commit() -> None:
        for name, value in progress.items():
            setattr(optimizer, name, _to_device(value, contexts[0]))
        _mxnet.replicate_update_counts(optimizer, contexts)
        if optimizer.lr_scheduler is not None:
            _restore_schedule(optimizer.lr_scheduler, found.scheduler)

    return commit


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_data(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return isinstance(value, (*_PLAIN, NDArray, np.ndarray))


def _to_host(value: Any) -> Any:
    """Copies all the way down; row-sparse states become dense."""
    return map_leaves(lambda leaf: leaf.asnumpy() if isinstance(leaf, NDArray) else copy.copy(leaf), value)


def _full(leaf: Any) -> Any:
    return leaf.astype(np.float32) if isinstance(leaf, np.ndarray) and leaf.dtype == np.float16 else leaf


def _to_device(value: Any, ctx: mx.Context) -> Any:
    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)


def _describe(schedule: Any) -> Any:
    """Class names and plain attributes of a schedule and of the schedules in it."""
    if isinstance(schedule, mx.lr_scheduler.LRScheduler):
        return {"class": type(schedule).__name__, "attrs": {k: _describe(v) for k, v in vars(schedule).items()}}
    if isinstance(schedule, (list, tuple)):
        return [_describe(item) for item in schedule]
    return copy.copy(schedule) if isinstance(schedule, _PLAIN) else None


def _kinds(described: Any) -> Any:
    if isinstance(described, dict):
        inner = {k: _kinds(v) for k, v in described["attrs"].items()}
        return [described["class"], *(v for v in inner.values() if v)]
    if isinstance(described, list):
        return [k for k in map(_kinds, described) if k]
    return None


def _restore_schedule(schedule: Any, described: Any) -> None:
    for name, value in described["attrs"].items():
        current = getattr(schedule, name, None)
        if isinstance(current, mx.lr_scheduler.LRScheduler):
            _restore_schedule(current, value)
        elif isinstance(current, (list, tuple)):
            for item, saved in zip(current, value or ()):
                if isinstance(item, mx.lr_scheduler.LRScheduler):
                    _restore_schedule(item, saved)
        elif isinstance(current, _PLAIN) and isinstance(value, _PLAIN):
            setattr(schedule, name, value)
