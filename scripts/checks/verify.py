"""How many ported programs ``mxmp.diagnose.verify`` answers right: those of scripts/support/ports, in both dtypes.

A right port counts if it is called right, a wrong one if it is named. ``--seeds N`` tries N seeds. ``--out FILE``
keeps the lines and goes on where an earlier run ended; ``--table FILE`` writes them as
scripts/lab/results/verify.json has them. Ends with 1 where an answer is wrong.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from support.options import parse
from support.ports import PORTS, Port
from support.results import carried_on, write_lines


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        __doc__, arguments, seeds=1, out=("", "JSON lines to go on from"), table=("", "the file to write"), only=""
    )
    known = carried_on(
        options.out,
        (
            ({"name": port.name, "kind": port.kind, "dtype": port.dtype, "seed": seed}, partial(answer, port, seed))
            for port in PORTS
            for seed in range(options.seeds)
            if options.only in port.name
        ),
    )
    for kind in ("right", "wrong"):
        lines = [each for each in known if each["kind"] == kind]
        programs = len({each["name"] for each in lines})
        print(f"{sum(each['answered'] for each in lines)} of {len(lines)} answered, {programs} {kind} ports")
    write_lines(options.table, known)
    return int(not all(each["answered"] for each in known))


def answer(port: Port, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    found = port.verified(seed)
    return {
        "right": found.right,
        "answered": port.is_answered(found),
        "verdict": found.verdict,
        "seconds": round(time.monotonic() - began, 1),
    }
