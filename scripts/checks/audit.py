"""How many planted operators ``mxmp.diagnose.audit`` names first, and on how many healthy networks it stays quiet.

They are those of ``support.plants``: each plant in the dtypes that it is listed for, each healthy network in both. A
plant counts if the operator that comes first is the planted one, or reads it or is read by it. ``--out FILE`` keeps the
lines and goes on where an earlier run ended; ``--table FILE`` writes them as results/audit.json has them. Ends with 1
where more than 5 in 100 plants fail, where "nothing stands out" of one, or where a healthy network is not quiet.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Callable, Iterator

from support.options import parse
from support.plants import healthy as trained
from support.plants import kinds, programs
from support.results import carried_on, write_lines


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, out=("", "JSON lines to go on from"), table=("", "the file to write"))
    known = carried_on(options.out, cases())
    plants = [each for each in known if each["kind"] != "healthy"]
    healthy = [each for each in known if each["kind"] == "healthy"]
    right, quiet = sum(each["right"] for each in plants), sum(each["right"] for each in healthy)
    unseen = sum(each["named"] == "nothing" for each in plants)
    number, networks = (len({(each["kind"], each["name"]) for each in of}) for of in (plants, healthy))
    print(f"{right} of {len(plants)} first ({number} plants), nothing stands out of {unseen};")
    print(f"{quiet} of {len(healthy)} quiet ({networks} healthy networks)")
    write_lines(options.table, known)
    return int(right < 0.95 * len(plants) or unseen > 0 or quiet < len(healthy))


def cases() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yield kind, name and dtype of each audit, and what runs it."""

    def named(kind: str, name: str, dtype: str) -> dict[str, Any]:
        return {"kind": kind, "name": name, "dtype": dtype}

    def run_plant(plant: Any, dtype: str) -> dict[str, Any]:
        found = kinds.audited(plant, dtype)
        first = found.findings[0].name if found.findings else "nothing"
        return said(found, first, bool(found.findings) and kinds.is_beside(plant, first))

    def run_healthy(audit: Callable, name: str, dtype: str) -> dict[str, Any]:
        found = audit(name, dtype)
        return said(found, ", ".join(each.name for each in found.findings) or "nothing", found.is_healthy)

    for plant in [*kinds.PLANTS, *programs.MORE]:
        for dtype in plant.dtypes:
            yield named(plant.kind, plant.name, dtype), partial(run_plant, plant, dtype)
    of_zoo = [(kinds.healthy, name) for name in kinds.HEALTHY]
    for audit, name in [*of_zoo, *((trained.healthy_too, name) for name in trained.HEALTHY_TOO)]:
        for dtype in kinds.BOTH:
            yield named("healthy", name, dtype), partial(run_healthy, audit, name, dtype)


def said(found: Any, named: str, right: bool) -> dict[str, Any]:
    lost = found.findings[0].lost if found.findings else ""
    noise, loss, gradient, output = found.total.cells()
    total = {"x noise": noise, "loss": loss, "gradient": gradient.partition(" ")[0], "output": output.partition(" ")[0]}
    return {"named": named, "right": right, "lost": lost, "replays": found.replays, **total}


if __name__ == "__main__":
    sys.exit(main())
