"""How many ported programs ``mxmp.diagnose.verify`` answers right: those of scripts/support/ports, in both dtypes.

A right port counts if it is called right, a wrong one if it is named. ``--seeds N`` tries N seeds, ``--only NAME`` the
programs with this in their names, and ``--recipes`` those of examples/ instead, which are right. ``--out FILE`` keeps
the lines and goes on where an earlier run ended; ``--table FILE`` writes them as scripts/lab/results/verify.json and,
of recipes, verify_recipes.json have them; of several seeds a row for each program and dtype, as verify_seeds.json has
them. Ends with 1 where an answer is wrong.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from support.options import parse
from support.ports import DTYPES, PORTS, RECIPES, Port
from support.results import carried_on, write_lines


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        __doc__,
        arguments,
        recipes=False,
        seeds=1,
        steps=20,
        dtypes=(DTYPES, "", DTYPES),
        only="",
        out=("", "JSON lines to go on from"),
        table=("", "the file to write"),
    )
    known = carried_on(
        options.out,
        (
            (
                {"name": port.name, "kind": port.kind, "dtype": port.dtype, "seed": seed},
                partial(answer, port, seed, options.steps),
            )
            for port in (RECIPES if options.recipes else PORTS)
            for seed in range(options.seeds)
            if options.only in port.name and port.dtype in options.dtypes
        ),
    )
    for kind in dict.fromkeys(each["kind"] for each in known):
        lines = [each for each in known if each["kind"] == kind]
        programs = len({each["name"] for each in lines})
        print(f"{sum(each['answered'] for each in lines)} of {len(lines)} answered, {programs} {kind} ports")
    write_lines(options.table, by_program(known) if options.seeds > 1 else known)
    return int(not all(each["answered"] for each in known))


def answer(port: Port, seed: int, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    found = port.verified(seed, steps)
    return {
        "right": found.right,
        "answered": port.is_answered(found),
        "verdict": found.verdict,
        "seconds": round(time.monotonic() - began, 1),
    }


def by_program(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each program and dtype: of how many seeds it is answered, and how many say what."""
    rows = []
    for name, dtype in dict.fromkeys((line["name"], line["dtype"]) for line in lines):
        its = [line for line in lines if (line["name"], line["dtype"]) == (name, dtype)]
        said = {str(right): sum(line["right"] is right for line in its) for right in (True, False, None)}
        rows.append(
            {
                "name": name,
                "kind": its[0]["kind"],
                "dtype": dtype,
                "seeds": len(its),
                "answered": sum(line["answered"] for line in its),
                "right": {right: count for right, count in said.items() if count},
            }
        )
    return rows
