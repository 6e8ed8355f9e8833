"""What the sweeps over the zoos print is of the file that they were given."""

from __future__ import annotations

import json

import pytest
from sweep import casts, plans


@pytest.mark.parametrize("tool", [casts, plans])
def test_a_summary_is_of_the_results_that_were_asked_for(tool, tmp_path, capsys):
    pair = [12, 18]
    figures = {"float16": pair, "float16-fast": pair}
    figures.update({" ".join(each): {"bytes": pair} for each in casts.VARIANTS})
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"nn.Conv2D": figures}))
    tool.main(["nn.Conv2D", "--results", str(path)])
    printed = capsys.readouterr().out
    assert "in 1 networks" in printed
    assert "nn.Conv2D: 12 -> 18 bytes" in printed
