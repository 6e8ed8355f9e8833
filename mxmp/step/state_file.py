"""The file of optimizer states: arrays and plain data, written completely or not at all, read without running code.

A file is a NumPy ``.npz`` without pickles: one JSON text that names the format and holds counters, hyper-parameters
and the nesting of the states, and the arrays that it refers to by number. Files of MXNet's own updater are pickles;
only MXNet's optimizers and arrays are admitted from them.
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

from ..files import replacing

__all__ = ["read", "read_pickle", "write"]

FORMAT = "mxmp-states-1"


def write(path: str, content: dict[str, Any]) -> None:
    """Write ``content``, nested plain data and NumPy arrays, to the file ``path``.

    If the process dies meanwhile, the file has the old content or the new, whole one. Raises ``OSError``, which names
    ``path``, if it cannot be written.
    """
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
    """Return the nested data that ``write`` wrote, from a file's bytes.

    Raises an exception of any class if the content is truncated, was changed, or is of another kind.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        tree = archive["tree"].tobytes().decode()
        arrays = [archive[f"a{i}"] for i in range(len(archive.files) - 2)]
        digest = archive["digest"]
    raw = json.loads(tree)
    if raw.pop("format") != FORMAT or not np.array_equal(digest, _digest(tree, arrays)):
        raise ValueError("its content does not match its digest")
    return {k: _decode(v, arrays) for k, v in raw.items()}


def read_pickle(content: bytes) -> tuple[dict, mx.optimizer.Optimizer | None]:
    """Return states and optimizer from the bytes that ``get_states`` of MXNet's Updater makes.

    The first maps a parameter's number to its state; the second is None if ``dump_optimizer`` was False. Only MXNet's
    own classes are admitted, so no other code runs. Raises an exception of any class for anything else.
    """
    found = _OnlyMXNet(io.BytesIO(content)).load()
    states, optimizer = (found, None) if isinstance(found, dict) else found
    if not isinstance(states, dict) or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise TypeError("it holds no states and optimizer")
    return states, optimizer


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return nested data in a form for JSON, with each NumPy array appended to ``arrays`` and replaced by its number.

    ``{"array": 3}`` stands for ``arrays[3]``; ``{"dict": [[key, value], ...]}``, ``{"list": [...]}`` and ``{"tuple":
    [...]}`` keep keys that are no strings, and tell tuples from lists.
    """
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
    """Return the nested data that ``_encode`` encoded, with the arrays from ``arrays``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {k: _decode(v, arrays) for k, v in content}
    return (tuple if kind == "tuple" else list)(_decode(v, arrays) for v in content)


def _digest(tree: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the SHA-256 of the JSON text and of all arrays, as 32 bytes in a uint8 array."""
    digest = hashlib.sha256(tree.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


class _OnlyMXNet(pickle.Unpickler):
    """Unpickles NDArrays, MXNet's optimizers and learning-rate schedules, and plain containers; nothing else.

    A pickle can name any class and run its code, and files of states may come from anywhere.
    """

    _NAMES: ClassVar = {
        "builtins": {"bytearray", "dict", "list", "object", "set"},
        "collections": {"OrderedDict", "defaultdict"},
        "copyreg": {"_reconstructor"},
        "numpy": {"dtype", "ndarray"},
        "numpy.core.multiarray": {"_reconstruct", "scalar"},
    }
    _KINDS = (NDArray, mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class ``module.name``, or raise ``UnpicklingError`` if it is not allowed.

        The pickle's code has not run then. Optimizers and schedules of GluonCV and GluonNLP are allowed as well.
        """
        if name in self._NAMES.get(module, ()):
            return super().find_class(module, name)
        if module.split(".")[0] in ("mxnet", "gluoncv", "gluonnlp"):
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, self._KINDS):
                return found
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is no array or optimizer of MXNet")
