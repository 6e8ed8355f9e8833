"""Finds which workarounds this version of MXNet needs: those whose tests fail without them.

For another version: PYTHONPATH=. ~/.cache/mxmp-versions/1.8.0/bin/python scripts/dev.py sweep workarounds
"""

from __future__ import annotations

import mxnet as mx
from support.left_out import exit_codes, seen_here
from support.options import parse
from support.results import FOLDER, read, write

RESULTS = FOLDER / "workarounds.json"


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    codes, printed = exit_codes(seen_here())
    if codes.pop(""):
        print(printed)
        return 1
    needed = {name: code != 0 for name, code in codes.items()}
    write(RESULTS, dict(sorted({**read(RESULTS), mx.__version__: needed}.items())))
    print(f"MXNet {mx.__version__} needs all but", ", ".join(name for name in needed if not needed[name]) or "none")
    return 0
