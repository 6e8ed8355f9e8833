"""``scripts/dev.py check verify``, and what its tables in scripts/lab/results say."""

from __future__ import annotations

import json

from checks.verify import by_program
from support.ports import PORTS
from support.results import FOLDER


def line(name, seed, right, answered):
    return {"name": name, "kind": "right", "dtype": "float16", "seed": seed, "right": right, "answered": answered}


def test_several_seeds_of_a_program_are_a_row():
    found = by_program([line("a", 0, True, True), line("b", 0, True, True), line("a", 1, None, False)])
    assert [(row["name"], row["seeds"], row["answered"], row["right"]) for row in found] == [
        ("a", 2, 1, {"True": 1, "None": 1}),
        ("b", 1, 1, {"True": 1}),
    ]


def test_the_table_of_all_programs_has_each_once_and_is_answered():
    rows = json.loads((FOLDER / "verify.json").read_text())
    assert sorted((row["name"], row["dtype"]) for row in rows) == sorted((port.name, port.dtype) for port in PORTS)
    assert all(row["answered"] for row in rows)


def test_no_verdict_in_the_table_of_seeds_changes_with_the_seed():
    rows = json.loads((FOLDER / "verify_seeds.json").read_text())
    known = {(port.name, port.kind, port.dtype) for port in PORTS}
    assert {(row["name"], row["kind"], row["dtype"]) for row in rows} <= known
    assert all(row["answered"] == row["seeds"] and len(row["right"]) == 1 for row in rows)
