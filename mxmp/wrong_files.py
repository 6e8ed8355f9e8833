"""What to say of a file that is missing, or that holds something else."""

from __future__ import annotations

import os
import zipfile
from difflib import get_close_matches

from .files import read_json

# By their first bytes. MXNet's number of a list of arrays: kMXAPINDArrayListMagic, src/ndarray/ndarray.cc.
_BEGINNINGS = {
    b"SQLite format 3\0": "an SQLite database",
    b"\x93NUMPY": "an array of NumPy, as in a .npy file",
    b"\x12\x01\0\0\0\0\0\0": "parameters of MXNet",
    b"\x80": "a pickle, as in a file of optimizer states",
}
_KEYS = {"nodes": "a Symbol in JSON", "operators": "a precision plan, as Plan.save writes it"}


def kind_of(path: str, unless: str = "") -> str:
    """Return the end of a message, ``"it holds a Symbol in JSON"``; ``""`` if not known, or of the kind ``unless``."""
    if os.path.isdir(path):
        return "it is a folder"
    with open(path, "rb") as file:
        begin = file.read(1024)
    found = next((kind for first, kind in _BEGINNINGS.items() if begin.startswith(first)), "")
    if not begin:
        return "it is empty"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_states = {"tree.npy", "digest.npy"} <= set(archive.namelist())
        found = "optimizer states of mxmp" if is_states else "arrays of NumPy, as in a .npz file"
    elif not found:
        try:
            raw = read_json(path)
            keys = raw if isinstance(raw, dict) else ()
            found = next((kind for key, kind in _KEYS.items() if key in keys), "JSON of another kind")
        except UnicodeDecodeError:
            return ""
        except ValueError:
            found = "text that is no JSON"
    return "" if unless and found.startswith(unless) else f"it holds {found}"


def near_name(path: str, ending: str = "") -> str:
    """Return the end of a message about a missing file, such as ``"; did you mean 'net-0010.params'?"``.
    Without a near name it lists files of the folder whose names have the ``ending`` of the kind, if there are any."""
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f"; there is no folder {folder!r}"
    near = get_close_matches(name, there, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {os.path.join(folder, near[0])!r}?"
    same = sorted(each for each in there if ending and each.endswith(ending))[:3]
    return f"; there is {' or '.join(repr(os.path.join(folder, each)) for each in same)}" if same else ""
