"""The model and the instruction sets of the CPU, as Linux lists them."""

from __future__ import annotations

import platform

CPUINFO = "/proc/cpuinfo"


def model() -> str:
    """Return the CPU's model name in ``/proc/cpuinfo``; on ARM, where it has none, ``"IMPLEMENTER PART"``.

    These are two numbers, such as ``"0x41 0xd0c"``. Where the file has neither a name nor numbers, as on another system
    than Linux, returns ``platform.processor()`` or, if that is empty, ``platform.machine()``.
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
    """Return the fields of ``/proc/cpuinfo``: from the name of each, such as ``"flags"``, to its different values.

    The values are those of all processors, in file order. A value is all text after the colon: one string has all the
    flags of a processor. The dict is empty if the file cannot be read, as on another system than Linux.
    """
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
