"""README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"## (\w+)\n\n```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_block_runs(title, code, capsys):
    exec(compile(code, f"README.md: {title}", "exec"), {})


def test_both_doors_are_shown():
    assert [title for title, _ in BLOCKS] == ["Gluon", "Symbolic"]
