"""Another tree of mxmp beside this one, such as a worktree of an earlier commit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Sequence

from support.results import SCRIPTS


def other_tree(given: Sequence[str]) -> Path:
    """Return the one folder that the user named; end the program if it holds no mxmp/."""
    if len(given) != 1 or not Path(given[0], "mxmp").is_dir():
        raise SystemExit(f"expected one folder that holds mxmp/, got {' '.join(given) or 'none'}")
    return Path(given[0]).resolve()


def environment_of(tree: Path) -> dict[str, str]:
    """Return the variables of a process that imports the mxmp in ``tree``, and this tree's scripts."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tree, *SCRIPTS]))}
