"""The check of the built manual's search finds what it is for. scripts/docs.sh runs it on the real index."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from checks.site import QUESTIONS, faults, lost

CONF = Path(__file__).resolve().parents[2] / "docs" / "conf.py"
ANSWERS = sorted({place.split("#")[0] for place in QUESTIONS.values()})
INDEX = {
    "docnames": ["loss-scaling", "models", *ANSWERS],
    "indexentries": {
        "loss scale": [[0, "", True]],
        **{
            question: [[2 + ANSWERS.index(page), section, True]]
            for question, (page, _, section) in ((q, place.partition("#")) for q, place in QUESTIONS.items())
        },
    },
    "terms": {"scale": [0, 2], "loss": 0},
    "titleterms": {"model": 2},
}


def found(**changes):
    return list(faults({**INDEX, **changes}, {"indexed": {"loss scale": "loss-scaling"}, "unsearched": ["models"]}))


def test_a_term_that_leads_elsewhere_or_nowhere_and_a_page_that_is_searched_are_faults():
    assert found() == []
    entries = INDEX["indexentries"]
    assert "finds []" in found(indexentries={**entries, "loss scale": []})[0]
    assert "finds ['gluon']" in found(indexentries={**entries, "resume": [[2, "", True]]})[0]
    assert "models should not be searched" in found(terms={"scale": [0, 1]})[0]
    assert "models should not be searched" in found(titleterms={"model": 1})[0]


def test_a_section_that_is_gone_is_a_fault(tmp_path):
    (tmp_path / "gluon.html").write_text('<section id="clipping">')
    assert list(lost({"a": "gluon#clipping", "b": "gluon"}, tmp_path)) == []
    assert list(lost({"a": "gluon#resume"}, tmp_path)) == ["gluon#resume: there is no such page or section"]
    assert list(lost({"a": "symbolic"}, tmp_path)) == ["symbolic: there is no such page or section"]


def test_the_terms_lead_to_pages_and_have_every_question_that_users_ask():
    indexed = runpy.run_path(str(CONF))["indexed"]
    assert {f"{place.split('#')[0]}.md" for place in indexed.values()} <= {p.name for p in CONF.parent.glob("*.md")}
    assert {question: indexed.get(question) for question in QUESTIONS} == QUESTIONS


def test_a_folder_has_the_excerpts_of_its_pages(tmp_path):
    sphinx = pytest.importorskip("sphinx.application")
    for name in ("index", "gluon"):
        (tmp_path / f"{name}.rst").write_text(f"{name}\n=====\n\nThe text of <{name}>.\n")
    conf = runpy.run_path(str(CONF))
    app = sphinx.Sphinx(tmp_path, None, tmp_path / "html", tmp_path / "trees", "html", status=None, warning=None)
    app.build()
    conf["write_excerpts"](app, None)
    text = (tmp_path / "html" / "_static" / "excerpts.js").read_text(encoding="utf-8")
    assert text.startswith("window.excerpts = {")
    assert 'div id=\\"gluon\\"' in text
    assert "The text of &lt;gluon&gt;." in text
