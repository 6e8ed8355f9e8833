"""The model and the instruction sets of the CPU, as Linux lists them."""

from __future__ import annotations

import os
import platform

CPUINFO = "/proc/cpuinfo"
# With one of these, sums of products of INT8 numbers are exact.
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")


def model() -> str:
    """Return the CPU's model name; on ARM, where Linux has none, implementer and part: ``"0x41 0xd0c"``."""
    fields = _fields()
    found = fields.get("model name") or [*fields.get("CPU implementer", ()), *fields.get("CPU part", ())]
    return " ".join(found) or platform.processor() or platform.machine()


def lacks(*instructions: str) -> bool:
    """Return whether the CPU has none of these, named as Linux does (``"avx512_bf16"``); False if that is not known."""
    known = _fields().get("flags")
    return known is not None and not any(set(instructions) & set(each.split()) for each in known)


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN has bfloat16 kernels for this CPU, native or emulated with AVX-512, and MXNet uses it."""
    # oneDNN 2.4, src/cpu/x64/cpu_isa_traits.hpp: avx512_core. Without oneDNN MXNet has none: "Unknown type enum 12".
    return not lacks("avx512bw") and os.environ.get("MXNET_MKLDNN_ENABLED", "1") != "0"


def multiplies_bfloat16_slowly() -> bool:
    """Return whether products of FP32 are faster, though the CPU has instructions for bfloat16."""
    # From Sapphire Rapids on, which has AVX512-FP16, Intel's VDPBF16PS makes half as many products a second as FP32's
    # FMA (0.53, measured on an Emerald Rapids). oneDNN 2.4.4 uses AMX by this name alone (cpu_isa_traits.hpp: isa_all).
    uses_amx = os.environ.get("DNNL_MAX_CPU_ISA") == "AVX512_CORE_AMX" and not lacks("amx_bf16")
    return "GenuineIntel" in _fields().get("vendor_id", ()) and not lacks("avx512_fp16") and not uses_amx


def _fields() -> dict[str, list[str]]:
    """Return the different values of each field of ``/proc/cpuinfo``, over all processors; empty without the file."""
    fields: dict[str, list[str]] = {}
    try:
        with open(CPUINFO, encoding="utf-8") as file:
            for line in file:
                name, _, value = map(str.strip, line.partition(":"))
                if value not in fields.setdefault(name, []):
                    fields[name].append(value)
    except OSError:
        return {}
    return fields
