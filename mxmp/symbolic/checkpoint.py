"""Checkpoints on disk: a Symbol and its parameters, in MXNet's formats. A file appears completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import struct
from reprlib import repr as shorten
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..files import read_json, replacing

__all__ = [
    "SavesParams",
    "last_line",
    "read_parameters",
    "read_symbol",
    "write_arrays",
    "write_symbol",
]


class SavesParams(mx.mod.BaseModule):
    """A module whose ``save_params`` notices a full disk."""

    def save_params(self, fname: str) -> None:
        """Save an FP32 file, as ``mx.mod.BaseModule.save_params``.

        Raises
        ------
        OSError
            The disk is full or the folder cannot be written; names the file. The old file stays as it was.
        """
        args, auxs = self.get_params()
        named = {**{f"arg:{k}": v for k, v in args.items()}, **{f"aux:{k}": v for k, v in auxs.items()}}
        with replacing(fname) as path:
            write_arrays(path, {k: v.as_in_context(mx.cpu()) for k, v in named.items()})


def write_symbol(path: str, symbol: mx.sym.Symbol, remove_amp_cast: bool = True) -> None:
    """Save a Symbol as ``symbol.save`` does, whose own writer does not notice a full disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(symbol.tojson(remove_amp_cast=remove_amp_cast))


def write_arrays(path: str, arrays: Mapping[str, NDArray] | Sequence[NDArray]) -> None:
    """Save as ``mx.nd.save``, which closes a file without checking that its last buffer was written.

    Names come last, so a file that ends with them is complete. A file without names is read back.

    Raises
    ------
    OSError
        Something is missing.
    """
    names = [name.encode() for name in arrays] if isinstance(arrays, Mapping) else []
    end = struct.pack("=Q", len(names)) + b"".join(struct.pack("=Q", len(name)) + name for name in names)
    incomplete = OSError(errno.EIO, "MXNet could not write all of it, is the disk full?")
    try:
        mx.nd.save(path, arrays)
        if not names:
            mx.nd.load(path)
    except mx.MXNetError as error:
        raise incomplete from error
    with open(path, "rb") as file:
        file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
        if file.read() != end:
            raise incomplete


def read_symbol(path: str) -> mx.sym.Symbol:
    """Return the Symbol in a JSON file. Raises ``ValueError``, which names the file, where it is missing or damaged."""
    if not os.path.isfile(path):
        raise ValueError(f"no file {path!r}; expected a Symbol in JSON, NAME-symbol.json")
    try:
        _check_graph(read_json(path))
        symbol = mx.sym.load(path)
        _check_outputs(symbol)
        symbol.infer_type_partial()  # counts the inputs of each operator
        return symbol
    except (mx.MXNetError, ValueError) as error:
        raise ValueError(f"{path!r} is no Symbol in JSON, or it is damaged: {last_line(error)}") from error


def _check_graph(raw: Any) -> None:
    """Raise ``ValueError`` if it is no graph: of a broken file MXNet's own reader may make garbage, or crash."""
    nodes, heads = _list(raw, "nodes"), _list(raw, "heads")
    if not nodes or not heads:
        raise ValueError(f"it has no {'heads' if nodes else 'nodes'}")
    for number, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("op", "name")):
            raise ValueError(f"node {number} has no op or no name")
        _check_places(_list(node, "inputs"), number)
        _check_places([[place] for place in _list(node, "control_deps")], number)
        for body in _list(node, "subgraphs"):
            _check_graph(body)
    _check_places(heads, len(nodes))
    _check_places([[place] for place in _list(raw, "arg_nodes")], len(nodes))


def _check_outputs(symbol: mx.sym.Symbol) -> None:
    """Raise ``ValueError`` if an operator reads an output that another does not have, which MXNet does not notice."""
    there = {(node, output) for node, output, *_ in json.loads(symbol.get_internals().tojson())["heads"]}
    graph = json.loads(symbol.tojson())
    for entry in [*graph["heads"], *(entry for node in graph["nodes"] for entry in node["inputs"])]:
        if tuple(entry[:2]) not in there:
            raise ValueError(f"it reads output {entry[1]} of node {entry[0]}, which has fewer")


def _list(raw: Any, key: str) -> list:
    found = raw.get(key, []) if isinstance(raw, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"it has no list of {key}, but {shorten(raw if found is None else found)}")
    return found


def _check_places(entries: list, count: int) -> None:
    """Raise ``ValueError`` unless each entry begins with the number of one of the first ``count`` nodes."""
    for entry in entries:
        places = entry if isinstance(entry, list) and entry else [-1]
        if not all(type(place) is int and 0 <= place < 2**31 for place in places) or places[0] >= count:
            raise ValueError(f"{shorten(entry)} is no place in it: expected the number of a node below {count} first")


def read_parameters(path: str) -> dict[str, NDArray]:
    """Return a checkpoint's parameters. Raises ``ValueError``, which names the file, where it is missing or damaged."""
    if not os.path.isfile(path):
        raise ValueError(f"no file {path!r}; expected parameters, NAME-0000.params")
    try:
        params = mx.nd.load(path)
    except mx.MXNetError as error:
        raise ValueError(f"{path!r} holds no MXNet parameters, or it is damaged: {last_line(error)}") from error
    if not isinstance(params, dict) or not all(k.startswith(("arg:", "aux:")) for k in params):
        raise ValueError(f"{path!r} holds no checkpoint: expected names such as 'arg:conv0_weight'; use net.export()")
    return params


def last_line(error: Exception) -> str:
    """Return the last line of an error's text: MXNet's own is after a stack trace."""
    return (str(error).strip().splitlines() or [""])[-1]
