"""How many planted operators ``mxmp.diagnose.audit`` names first, and on how many healthy networks it stays quiet.

They are those of tests/diagnose/plants.py: each plant in the dtypes that it is listed for, each healthy network in
both. Ends with 1 where one fails.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from support.options import parse
from support.results import ROOT

sys.path[:0] = [str(ROOT / "tests" / "diagnose")]


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    plants = importlib.import_module("plants")

    first = quiet = 0
    for plant in plants.PLANTS:
        found = {dtype: plants.audited(plant, dtype) for dtype in plant.dtypes}
        names = {dtype: each.findings[0].name if each.findings else "nothing" for dtype, each in found.items()}
        first += set(names.values()) == {plants.PLANTED}
        show(f"{plant.kind}, {plant.name}", found, names)
    for name in plants.HEALTHY:
        found = {dtype: plants.healthy(name, dtype) for dtype in plants.BOTH}
        quiet += all(each.is_healthy for each in found.values())
        show(name, found, {dtype: "quiet" if each.is_healthy else "not quiet" for dtype, each in found.items()})
    print(f"{first} of {len(plants.PLANTS)} plants first, {quiet} of {len(plants.HEALTHY)} healthy quiet")
    return int(first < len(plants.PLANTS) or quiet < len(plants.HEALTHY))


def show(name: str, found: dict[str, Any], said: dict[str, str]) -> None:
    """Print a line: in each dtype what was named, how many times the noise everything low is, and what was lost."""
    cells = []
    for dtype, each in found.items():
        lost = f", {each.findings[0].lost}" if each.findings else ""
        cells.append(f"{dtype} {said[dtype]} ({each.total.times_noise:.3g} times the noise{lost})")
    print(f"{name}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
