"""Checkpoints are read: files that may be damaged, on which MXNet's reader may crash, or of another kind."""

from __future__ import annotations

import json
import os
import re
from reprlib import repr as shorten
from typing import Any

import mxnet as mx
from mxnet.ndarray import NDArray

from ..callbacks import last_line
from ..files import read_json
from ..versions import NOW
from ..wrong_files import kind_of, near_name


def read_symbol(path: str) -> mx.sym.Symbol:
    """Return the Symbol in a JSON file; ``ValueError``, which names the file, if it does not exist or is damaged."""
    if not os.path.isfile(path):
        raise _missing(path, "a Symbol in JSON", "-symbol.json")
    try:
        # First, since MXNet's reader crashes on some damaged files.
        _check_graph(read_json(path))
        symbol = mx.sym.load(path)
        _check_outputs(symbol)
        _count_inputs(symbol)
        return symbol
    except (mx.MXNetError, ValueError) as error:
        why = kind_of(path, "a Symbol") or last_line(error)
        raise ValueError(
            f"{path!r} is no Symbol in JSON, or it is damaged: {why}; expected NAME-symbol.json"
        ) from error


# What loss heads, Dropout and BilinearSampler say where nobody has given a type yet.
_ASKS_FOR_A_TYPE = r"Check failed: [^:]* != -1\b|type to dropout is not specified|Not enough information to infer type"


def _count_inputs(symbol: mx.sym.Symbol) -> None:
    """Raise ``MXNetError`` if an operator has too few or too many inputs."""
    try:
        symbol.infer_type_partial()
    except mx.MXNetError as error:
        is_unknown = re.search(_ASKS_FOR_A_TYPE, str(error))
        if not is_unknown and (NOW.infers_partly or "must have specified type" not in str(error)):
            raise


def _check_graph(raw: Any) -> None:
    """Raise ``ValueError`` unless a parsed file is Symbol JSON, since MXNet may crash or return a wrong graph."""
    nodes, heads = _list_at(raw, "nodes"), _list_at(raw, "heads")
    if not nodes or not heads:
        raise ValueError(f"it has no {'heads' if nodes else 'nodes'}")
    for number, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("op", "name")):
            raise ValueError(f"node {number} has no op or no name")
        _check_references(_list_at(node, "inputs"), number)
        _check_references([[place] for place in _list_at(node, "control_deps")], number)
        for body in _list_at(node, "subgraphs"):
            _check_graph(body)
    _check_references(heads, len(nodes))
    _check_references([[place] for place in _list_at(raw, "arg_nodes")], len(nodes))


def _check_outputs(symbol: mx.sym.Symbol) -> None:
    """Raise ``ValueError`` if an output is read that its node lacks, which MXNet's reader does not notice."""
    there = {(node, output) for node, output, *_ in json.loads(symbol.get_internals().tojson())["heads"]}
    graph = json.loads(symbol.tojson())
    for entry in [*graph["heads"], *(entry for node in graph["nodes"] for entry in node["inputs"])]:
        if tuple(entry[:2]) not in there:
            raise ValueError(f"it reads output {entry[1]} of node {entry[0]}, which has fewer")


def _list_at(raw: Any, key: str) -> list:
    found = raw.get(key, []) if isinstance(raw, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"it has no list of {key}, but {shorten(raw if found is None else found)}")
    return found


def _check_references(entries: list, count: int) -> None:
    """Raise ``ValueError`` unless the first number of each entry, such as ``[3, 0, 0]``, is one of ``count`` nodes."""
    for entry in entries:
        places = entry if isinstance(entry, list) and entry else [-1]
        if not all(type(place) is int and 0 <= place < 2**31 for place in places) or places[0] >= count:
            raise ValueError(f"{shorten(entry)} is no place in it: expected the number of a node below {count} first")


def read_parameters(path: str) -> dict[str, NDArray]:
    """Return the arrays of a checkpoint by ``"arg:NAME"`` and ``"aux:NAME"``; a ``ValueError`` names a wrong file."""
    if not os.path.isfile(path):
        raise _missing(path, "parameters", "-0000.params")
    try:
        params = mx.nd.load(path)
    except mx.MXNetError as error:
        why = kind_of(path, "parameters") or last_line(error)
        raise ValueError(
            f"{path!r} holds no MXNet parameters, or it is damaged: {why}; expected NAME-0000.params"
        ) from error
    named = isinstance(params, dict)
    other = [name for name in params if not name.startswith(("arg:", "aux:"))] if named else []
    if other or not named:
        raise ValueError(
            f"{path!r} holds no checkpoint: expected names such as 'arg:conv0_weight', got "
            f"{repr(other[0]) if named else 'a list of arrays'}; use net.export() instead of net.save_parameters()"
        )
    return params


def read_values(path: str) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    """Return the parameters and the auxiliary states of a checkpoint by name; raises the errors of
    ``read_parameters``."""
    params = read_parameters(path)
    args, auxs = ({k[4:]: v for k, v in params.items() if k.startswith(kind)} for kind in ("arg:", "aux:"))
    return args, auxs


def _missing(path: str, kind: str, ending: str) -> ValueError:
    expected = f"{kind}, NAME{ending}"
    if os.path.isdir(path):
        return ValueError(f"no file {path!r}, it is a folder; expected {expected}")
    return ValueError(f"no file {path!r}; expected {expected}{near_name(path, ending[-7:])}")
