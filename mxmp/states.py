"""Optimizer states on disk: arrays and plain data, written atomically, read without running code.

A file is a NumPy ``.npz`` without pickles: one JSON text that names the format and holds counters,
hyper-parameters and the nesting of the states, and the arrays that it refers to by number.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import zipfile
from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .layouts import Layout, agree, check_states, difference, map_leaves, with_attributes

__all__ = ["OptimizerStates", "apply_states", "collect", "read", "replacing", "to_device", "write"]

FORMAT = "mxmp-states-1"
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


def write(path: str, states: OptimizerStates) -> None:
    """Write a file so that ``path`` holds the old content or the new, whenever the process dies."""
    arrays: list[np.ndarray] = []
    tree = json.dumps({"format": FORMAT, **{k: _encode(v, arrays) for k, v in states._asdict().items()}})
    named = {f"a{i}": array for i, array in enumerate(arrays)}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, tree=np.frombuffer(tree.encode(), np.uint8), digest=_digest(tree, arrays), **named)


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def read(path: str) -> OptimizerStates:
    """Read our file, or the states file of a plain MXNet updater with its optimizer in it.

    Raises
    ------
    ValueError
        The file is truncated, tampered with, or of another kind.
    """
    with open(path, "rb") as file:
        content = file.read()
    if not content.startswith(b"PK"):
        return _read_plain(path, content)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            tree = archive["tree"].tobytes().decode()
            arrays = [archive[f"a{i}"] for i in range(len(archive.files) - 2)]
            digest = archive["digest"]
        raw = json.loads(tree)
        if raw.pop("format") != FORMAT or not np.array_equal(digest, _digest(tree, arrays)):
            raise ValueError("its content does not match its digest")
        return OptimizerStates(**{k: _decode(v, arrays) for k, v in raw.items()})
    except (zipfile.BadZipFile, KeyError, TypeError, IndexError, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"{path!r} is no states file of mxmp, or it was truncated or changed ({error}); nothing was loaded"
        ) from error


def apply_states(
    found: OptimizerStates,
    optimizer: mx.optimizer.Optimizer,
    shapes: Sequence[tuple],
    devices: Sequence[int],
    ctx: mx.Context | None = None,
) -> Callable[[], None]:
    """Check that ``found`` fits, and return what sets the optimizer's progress.

    Update counts are replicated to all ``devices`` (MXNet restores the saved ones only, and Adam on the
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
            setattr(optimizer, name, to_device(value, ctx or mx.cpu()))
        saved = optimizer._all_index_update_counts.values()
        counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
        optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
        optimizer._index_update_count = optimizer._all_index_update_counts[0]
        if optimizer.lr_scheduler is not None:
            _restore_schedule(optimizer.lr_scheduler, found.scheduler)

    return commit


# -- host and device --------------------------------------------------------------------------------


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


def to_device(value: Any, ctx: mx.Context) -> Any:
    def leaf(item: Any) -> Any:
        return mx.nd.array(item, ctx=ctx, dtype=item.dtype) if isinstance(item, np.ndarray) else item

    return map_leaves(leaf, value)


# -- learning-rate schedules ------------------------------------------------------------------------


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


# -- JSON with numbered arrays ----------------------------------------------------------------------


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"dict": [[k, _encode(v, arrays)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_encode(v, arrays) for v in value]}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _decode(value: Any, arrays: list[np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {k: _decode(v, arrays) for k, v in content}
    return (tuple if kind == "tuple" else list)(_decode(v, arrays) for v in content)


def _digest(tree: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    digest = hashlib.sha256(tree.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


# -- files of plain MXNet ---------------------------------------------------------------------------


class _OnlyMXNet(pickle.Unpickler):
    """Admits NDArrays, MXNet's optimizers and learning-rate schedules, and plain containers."""

    _NAMES = frozenset(
        {
            ("builtins", "set"),
            ("builtins", "dict"),
            ("builtins", "list"),
            ("builtins", "bytearray"),
            ("collections", "OrderedDict"),
            ("collections", "defaultdict"),
            ("copyreg", "_reconstructor"),
            ("builtins", "object"),
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy.core.multiarray", "scalar"),
        }
    )
    _KINDS = (NDArray, mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module.split(".")[0] in ("mxnet", "gluoncv", "gluonnlp"):
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, self._KINDS):
                return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array or optimizer of MXNet")


def _read_plain(path: str, content: bytes) -> OptimizerStates:
    try:
        states, optimizer = _OnlyMXNet(io.BytesIO(content)).load()
        if not isinstance(states, dict) or not isinstance(optimizer, mx.optimizer.Optimizer):
            raise TypeError("it holds no states and optimizer")
        found = collect({}, optimizer, states, {}, [])
    except Exception as error:
        raise ValueError(
            f"{path!r} is no states file of mxmp or of a gluon.Trainer, or it was truncated or changed ({error}); "
            "nothing was loaded"
        ) from error
    return found._replace(step=None, shapes=None)
