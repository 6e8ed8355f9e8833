"""The benchmark of inference: a table of what was measured, and a run that goes on."""

import json

from bench import inference


def test_a_row_says_how_many_times_as_fast_and_how_close():
    found = {
        "candidates": {"float32": [10.0, None, ""], "float32, fused": [5.0, 120.0, ""], "int8": [None, None, "fails"]},
        "served": 1.954,
        "seconds": 3.0,
    }
    assert inference.row("net, 1 at 8", found) == "| net, 1 at 8 | 10.0 ms | 2.00 (120 dB) | none | fails | 1.95 | 3 |"


def test_a_run_goes_on_with_what_the_file_has(tmp_path, capsys):
    found = {"candidates": {"float32": [10.0, None, ""]}, "seconds": 3.0}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"net, 1 at 112": found}))
    inference.main(["net", "--batch", "1", "--results", str(file)])
    assert "| net, 1 at 112 | 10.0 ms |" in capsys.readouterr().out
