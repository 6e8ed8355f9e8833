"""The glossary, and the words that it replaces."""

from __future__ import annotations

import re
from pathlib import Path

from checks.words import PRIVATE_WORDS

ROOT = Path(__file__).resolve().parents[2]


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
