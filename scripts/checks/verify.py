"""How many ported programs ``mxmp.diagnose.verify`` answers right: those of scripts/support/ports, in both dtypes.

A right port counts if it is called right, a wrong one if it is named. ``--seeds N`` tries N seeds. ``--out FILE``
keeps the lines and goes on where an earlier run ended; ``--table FILE`` writes them as
scripts/lab/results/verify.json has them. Ends with 1 where an answer is wrong.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.options import parse
from support.ports import PORTS


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        __doc__, arguments, seeds=1, out=("", "JSON lines to go on from"), table=("", "the file to write"), only=""
    )
    out = Path(options.out) if options.out else None
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {(each["name"], each["dtype"], each["seed"]) for each in known}
    for port in PORTS:
        for seed in range(options.seeds):
            if options.only not in port.name or (port.name, port.dtype, seed) in done:
                continue
            began = time.monotonic()
            found = port.verified(seed)
            known.append(
                {
                    "name": port.name,
                    "kind": port.kind,
                    "dtype": port.dtype,
                    "seed": seed,
                    "right": found.right,
                    "answered": port.is_answered(found),
                    "verdict": found.verdict,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            print(json.dumps(known[-1]), flush=True)
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(known[-1]) + "\n")
    for kind in ("right", "wrong"):
        lines = [each for each in known if each["kind"] == kind]
        programs = len({each["name"] for each in lines})
        print(f"{sum(each['answered'] for each in lines)} of {len(lines)} answered, {programs} {kind} ports")
    if options.table:
        text = ",\n".join(json.dumps(each) for each in known)
        Path(options.table).write_text(f"[\n{text}\n]\n")
    return int(not all(each["answered"] for each in known))
