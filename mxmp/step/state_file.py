"""The file of optimizer states: arrays and plain data, written completely or not at all, read without running code.
It is a NumPy ``.npz`` without pickles: one JSON text, and the arrays that it refers to by number. Files of MXNet's own
updater are pickles; only MXNet's optimizers and arrays are admitted from them.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from typing import Any, ClassVar, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..host.files import replacing

FORMAT = "mxmp-states-1"


def write(path: str, content: dict[str, Any]) -> None:
    """Write nested dicts, lists and tuples of NumPy arrays, numbers, strings and None to a file."""
    arrays: list[np.ndarray] = []
    tree = json.dumps({"format": FORMAT, **{k: _encode(v, arrays) for k, v in content.items()}})
    named = {f"a{i}": array for i, array in enumerate(arrays)}
    named = {"tree": np.frombuffer(tree.encode(), np.uint8), "digest": _digest(tree, arrays), **named}
    # np.savez would write the same file, but when the disk is full it leaves the archive open.
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in named.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def read(content: bytes) -> dict[str, Any]:
    """Return the data that ``write`` wrote; raise an exception of any class if the bytes are damaged or others."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        tree = archive["tree"].tobytes().decode()
        arrays = [archive[f"a{i}"] for i in range(len(archive.files) - 2)]
        digest = archive["digest"]
    raw = json.loads(tree)
    if raw.pop("format") != FORMAT or not np.array_equal(digest, _digest(tree, arrays)):
        raise ValueError("its content does not match its digest")
    return {k: _decode(v, arrays) for k, v in raw.items()}


def read_pickle(content: bytes) -> tuple[dict, mx.optimizer.Optimizer | None]:
    """Return the states, by index or name, and the optimizer, or None, that ``Updater.get_states`` of MXNet wrote.
    Raises an exception of any class for other bytes."""
    found = _OnlyMXNet(io.BytesIO(content)).load()
    states, optimizer = (found, None) if isinstance(found, dict) else found
    if not isinstance(states, dict) or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise TypeError("it holds no states and optimizer")
    return states, optimizer


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return nested data in a form for JSON; move arrays to the end of ``arrays``, and leave ``{"array": 3}``."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    # Containers are written with their type: JSON alone would make keys strings, and tuples lists.
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
    """Return the SHA-256 of text and arrays, as 32 bytes in a uint8 array."""
    digest = hashlib.sha256(tree.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


class _OnlyMXNet(pickle.Unpickler):
    """An unpickler that makes only NDArrays, optimizers, learning-rate schedules and containers."""

    # A pickle can name any class and run its code, and states files may come from anywhere.
    _NAMES: ClassVar = {
        "builtins": {"bytearray", "dict", "list", "object", "set"},
        "collections": {"OrderedDict", "defaultdict"},
        "copyreg": {"_reconstructor"},
        "numpy": {"dtype", "ndarray"},
        "numpy.core.multiarray": {"_reconstruct", "scalar"},
    }
    _KINDS = (NDArray, mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)

    def find_class(self, module: str, name: str) -> Any:
        if name in self._NAMES.get(module, ()):
            return super().find_class(module, name)
        if module.split(".")[0] in ("mxnet", "gluoncv", "gluonnlp"):
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, self._KINDS):
                return found
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is no array or optimizer of MXNet")
