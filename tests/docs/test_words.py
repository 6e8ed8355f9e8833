"""The glossary, and the words that it replaces."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from checks.words import PRIVATE_WORDS, offenders

ROOT = Path(__file__).resolve().parents[2]
# What remains in mxmp/; both numbers may only fall: python scripts/dev.py check words
LEFT = {"name": 0, "docstring": 0}


def test_names_and_docstrings_keep_the_rules_of_the_language():
    found = Counter(each.rule for each in offenders())
    assert {rule: found[rule] for rule in LEFT if found[rule] > LEFT[rule]} == {}


CODE = """
def is_asked(x):
    '''Whether it is.'''

def told(x):
    '''Return it.'''

task = note_2 = _foreignX = 1
"""


def test_the_rules_find_what_they_are_for(tmp_path):
    (tmp_path / "door.py").write_text(CODE)
    assert [(each.rule, each.text.split(":")[0]) for each in offenders(tmp_path)] == [
        ("name", "door"),
        ("name", "is_asked"),
        ("docstring", "is_asked"),
        ("name", "told"),
        ("name", "_foreignX"),
    ]


def test_the_glossary_is_short_and_free_of_the_words_that_it_replaces():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Words\n")[1].split("\n## ")[0]
    terms = re.findall(r"^\| ([\w ]+) \|", text, re.MULTILINE)[1:]
    assert 15 <= len(terms) <= 25
    replaced = PRIVATE_WORDS | {
        "given",
        "whole",
        "marks",
        "progress",
        "low",
        "head",
        "plain",
        "behind",
        "tap",
        "row",
        "room",
    }
    assert replaced.isdisjoint(terms)
    assert PRIVATE_WORDS.isdisjoint(re.findall(r"[a-z]+", text.lower()))
