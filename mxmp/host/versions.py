"""What differs between the versions of MXNet that mxmp runs on: one table, read once. Other versions are refused, or
warned of."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import mxnet as mx


@dataclass(frozen=True)
class Version:
    """What one version of MXNet has."""

    # Whether a HybridBlock forgets the arguments of its graph with the graph, and has an empty list of them before.
    clears_graph_arguments: bool = True
    # Whether ``infer_type_partial`` leaves open what inputs without a dtype do not tell; otherwise a loss head raises.
    infers_partly: bool = True
    # Whether norms of volumes train: oneDNN computes none. Since 1.8.0 it does, and fails in blocked 3-D layouts.
    trains_norms_of_volumes: bool = False


_TABLE = {
    (1, 7, 0): Version(clears_graph_arguments=False, infers_partly=False, trains_norms_of_volumes=True),
    (1, 8, 0): Version(clears_graph_arguments=False),
    (1, 9, 0): Version(),
    (1, 9, 1): Version(),
}
_NAMES = [".".join(map(str, numbers)) for numbers in _TABLE]
# "1.7.0, 1.8.0, 1.9.0 or 1.9.1"
TRIED = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"


def find(version: str) -> tuple[tuple[int, int, int], Version]:
    """Return the numbers of a version such as ``"1.8.0"``, and what it has; of an unknown one, what the newest has.
    Warns of it, and raises ``ImportError`` for one before or behind all 1.x that mxmp can run on."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    major, minor, patch = map(int, found.groups()) if found else (0, 0, 0)
    numbers = (major, minor, patch)
    if numbers in _TABLE:
        return numbers, _TABLE[numbers]
    if not min(_TABLE) < numbers < (2, 0, 0):
        raise ImportError(
            f"mxmp runs on Apache MXNet {TRIED}, and this is MXNet {version} ({mx.__file__}). Install one of these: "
            "pip install 'mxmp[cpu]' 'numpy<1.24', or 'mxmp[cu112]' for CUDA 11.2",
            name="mxnet",
        )
    warnings.warn(
        f"mxmp was tried on Apache MXNet {TRIED}, not on MXNet {version}, which it takes for {_NAMES[-1]}",
        stacklevel=3,
    )
    return numbers, _TABLE[max(_TABLE)]


NUMBERS, NOW = find(mx.__version__)
# The attributes of a graph that this version has made. Without them MXNet takes it for one of an old version.
GRAPH_ATTRIBUTES = {"mxnet_version": ["int", NUMBERS[0] * 10000 + NUMBERS[1] * 100 + NUMBERS[2]]}
