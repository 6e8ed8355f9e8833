"""The machine on which times are measured, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import mxnet as mx

from ..kernels.fit import SWITCH

__all__ = ["cache_file", "describe"]

# They change the kernels that MXNet and oneDNN pick, or their threads.
_VARIABLES = (
    SWITCH,
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MXNET_MKLDNN_ENABLED",
)


def describe(ctx: mx.Context) -> dict[str, Any]:
    """Return the processor, threads, and builds of MXNet and mxmp: times hold where all of them are the same."""
    return {
        "device": ctx.device_type,
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "mxnet": mx.__version__,
        "mxmp": _source(),
        "features": sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled),
    }


def cache_file(machine: dict[str, Any], folder: str | os.PathLike | None = None) -> str:
    """Return the path of the file for a machine, in ``folder`` (default: the user's cache folder), which is made.

    Raises
    ------
    ImportError
        platformdirs, which knows that folder, is not installed.
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
    """Return a hash of the code that makes graphs, and of the code that times them."""
    package = Path(__file__).parents[1]
    files = sorted(path for name in ("precision", "kernels", "tuning") for path in (package / name).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*files, package / "pipeline.py"])).hexdigest()[:12]


def _processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    try:
        with open(cpuinfo, encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
