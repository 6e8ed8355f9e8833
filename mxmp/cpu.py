"""The model and the instruction sets of the CPU, as Linux lists them."""

from __future__ import annotations

import platform

CPUINFO = "/proc/cpuinfo"


def model() -> str:
    """Return the CPU's model name as Linux lists it; on ARM, which has none, the numbers of the maker and the design.

    On another system, returns the type of processor or machine from Python's ``platform``.
    """
    fields = _fields()
    found = fields.get("model name") or [*fields.get("CPU implementer", ()), *fields.get("CPU part", ())]
    return " ".join(found) or platform.processor() or platform.machine()


def lacks(*instructions: str) -> bool:
    """Return whether the CPU has none of these ``instructions``, named as Linux does: ``lacks("avx512_bf16")``.

    Returns False, too, where no list of instruction sets can be read.
    """
    known = _fields().get("flags")
    return known is not None and not any(set(instructions) & set(each.split()) for each in known)


def _fields() -> dict[str, list[str]]:
    """Return the different values of each field that Linux lists for the processors; empty on another system."""
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
