"""The machine on which times are measured, and the file that keeps them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import mxnet as mx

from .. import cpu
from ..kernels.fit import SWITCH
from ..precision import safe_sums

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
