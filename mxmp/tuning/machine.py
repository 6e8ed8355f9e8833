"""The machine on which times are measured, and the file that keeps them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Mapping

import mxnet as mx

from ..host import cpu
from ..host.files import check_writable, read_json, replacing
from ..kernels.fit import SWITCH
from ..messages.callers import warn_user
from ..precision import safe_sums

CAST = " -> "  # in the keys of casts only
_DAY = 86400.0
# Environment variables that change the kernels that MXNet and oneDNN pick, or their threads.
_VARIABLES = (
    SWITCH,
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MXNET_MKLDNN_ENABLED",
    safe_sums.VARIABLE,
)


def describe(ctx: mx.Context) -> dict[str, Any]:
    """Return, as data for JSON, all on which measured times depend."""
    return {
        "device": ctx.device_type,
        "gpu": _gpu(ctx.device_id) if ctx.device_type == "gpu" else None,
        "processor": cpu.model(),  # on a GPU too
        "processors": processors(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "mxnet": mx.__version__,
        "mxmp": _source(),
        "features": sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled),
    }


def processors() -> int:
    """Return how many processors the CPU affinity allows, or exist; a container's quota does not change it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_file(machine: dict[str, Any], folder: str | os.PathLike | None = None) -> str:
    """Return the path of the file of times for what ``describe`` returned; None is the user's cache folder."""
    if folder is None:
        try:
            from platformdirs import user_cache_dir
        except ImportError as error:
            raise ImportError(f"tuning needs platformdirs ({error}): pip install 'mxmp[tune]'") from error
        folder = user_cache_dir("mxmp")
    os.makedirs(folder, exist_ok=True)
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    return os.path.join(folder, f"times-{key}.json")


def kept_times(machine: dict[str, Any], folder: str | os.PathLike | None) -> tuple[str | None, dict[str, float]]:
    """Return the file of times, None if it cannot be written, and what it holds; warn where it cannot be used."""
    file, known, why = None, {}, None
    try:
        file = cache_file(machine, folder)
        known = read(file)
    except (OSError, ValueError) as error:
        why = f"measures anew, for {file or 'the cache'} cannot be used: {error}"
    if file is not None:
        try:
            check_writable(file)
        except OSError as error:
            file, why = None, f"will not keep its times: {error}"
    if why is not None:
        warn_user(f"tune {why}")
    return file, known


def read(path: str) -> dict[str, float]:
    """Return the times that ``write`` wrote, empty without a file; ``ValueError`` if they are impossible."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"it is no JSON of times ({type(error).__name__})") from error
    known = found.get("seconds") if isinstance(found, dict) else None
    # Neither NaN nor infinity is less than a day.
    if not isinstance(known, dict) or not all(type(v) in (int, float) and abs(v) < _DAY for v in known.values()):
        raise ValueError("it does not hold a number of seconds for each operator")
    # The time of a cast may be below 0.
    operators = [value for key, value in known.items() if CAST not in key]
    if known and not (min(operators, default=0.0) >= 0.0 < max(operators, default=0.0)):
        raise ValueError("its operators take no time, or less than none")
    return {key: float(value) for key, value in known.items()}


def write(path: str, machine: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Write ``Table.seconds``, and the ``machine.describe`` for which they hold."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "seconds": dict(sorted(seconds.items()))}, file, indent=1)


def _source() -> str:
    """Return a hash of the code that makes and times graphs: times of other code are not used again."""
    package = Path(__file__).parents[1]
    files = sorted(path for name in ("precision", "kernels", "tuning") for path in (package / name).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*files, package / "pipeline.py"])).hexdigest()[:12]


def _gpu(number: int) -> str:
    """Return a GPU's model by CUDA's driver, such as ``"NVIDIA A100-SXM4-40GB"``; ``""`` where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)
    return "" if failed or driver.cuDeviceGetName(name, len(name), device) else name.value.decode()
