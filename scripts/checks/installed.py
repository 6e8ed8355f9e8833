"""Checks an installed mxmp in an empty environment: python installed.py README.md VERSION, in an empty folder.

The version is the one that was built, nothing is imported from a clone, and the Python blocks of README run, each in
its own namespace. Only what the wheel brings is there, so this imports nothing of the project's scripts.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import mxmp


def main(readme: str, version: str) -> None:
    installed = importlib.metadata.version("mxmp")
    assert mxmp.__version__ == installed == version, (mxmp.__version__, installed, version)
    assert Path(sys.prefix) in Path(mxmp.__file__).parents, f"mxmp was imported from {mxmp.__file__}"
    assert (Path(mxmp.__file__).parent / "py.typed").exists()
    found = re.findall(r"^```python\n(.*?)^```$", Path(readme).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"{readme} has no Python"
    for code in found:
        exec(compile(code, readme, "exec"), {"__name__": "__main__"})
    subprocess.run([sys.executable, "-m", "mxmp", "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"==> mxmp {installed} runs {len(found)} blocks of README from {Path(mxmp.__file__).parent}")


if __name__ == "__main__":
    main(*sys.argv[1:])
