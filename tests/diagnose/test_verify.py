"""``verify``: whether a port is right, and what is left only rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxmp.diagnose import verify

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
RIGHT = sorted(path.stem for path in (PROGRAMS / "right").glob("*.py"))


@pytest.mark.parametrize("program", RIGHT)
def test_a_right_port_is_called_right(program):
    found = verify(PROGRAMS / "right" / f"{program}.py", progress=False)
    assert found.right, str(found)
    assert found.verdict.startswith("The port is right. ")
