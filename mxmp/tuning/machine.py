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
    """Return what measured times depend on, as data for JSON: times hold only where all of it is the same.

    The keys are ``"device"`` (the type of ``ctx``, ``"cpu"`` or ``"gpu"``), ``"gpu"`` (the model of that GPU, None for
    a CPU), ``"processor"`` (the CPU's model, on a GPU too), ``"processors"`` (how many this process may use),
    ``"environment"`` (those environment variables that are set and change kernels or threads), ``"mxnet"`` (its
    version), ``"mxmp"`` (a hash of its code) and ``"features"`` (those that MXNet is built with).
    """
    return {
        "device": ctx.device_type,
        "gpu": _gpu(ctx.device_id) if ctx.device_type == "gpu" else None,
        "processor": cpu.model(),
        "processors": processors(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "mxnet": mx.__version__,
        "mxmp": _source(),
        "features": sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled),
    }


def processors() -> int:
    """Return how many processors this process may use by its CPU affinity; on a system without that, how many exist.

    A container's quota and ``OMP_NUM_THREADS`` do not change this number.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_file(machine: dict[str, Any], folder: str | os.PathLike | None = None) -> str:
    """Return the path of the file in which ``tune`` keeps the times measured on one machine. It need not exist.

    ``machine`` is what ``describe`` returned; its hash is in the file's name. ``folder`` is created if it is missing;
    ``OSError`` is raised if that fails. Default: the user's cache folder; without platformdirs, which knows it,
    ``ImportError`` is raised.
    """
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
    """Return a hash of mxmp's code that makes and times graphs, so that times of other code are not used again."""
    package = Path(__file__).parents[1]
    files = sorted(path for name in ("precision", "kernels", "tuning") for path in (package / name).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*files, package / "pipeline.py"])).hexdigest()[:12]


def _gpu(number: int) -> str:
    """Return the model of the GPU with this ``device_id``, such as ``"NVIDIA A100-SXM4-40GB"``.

    The name is that of CUDA's driver. It is ``""`` if there is no driver, or no such GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)
    return "" if failed or driver.cuDeviceGetName(name, len(name), device) else name.value.decode()
