"""The check of the built manual's search finds what it is for. scripts/docs.sh runs it on the real index."""

from __future__ import annotations

import runpy
from pathlib import Path

from checks.site import faults

CONF = Path(__file__).resolve().parents[2] / "docs" / "conf.py"
INDEX = {
    "docnames": ["loss-scaling", "models", "gluon"],
    "indexentries": {"loss scale": [[0, "", True]]},
    "terms": {"scale": [0, 2], "loss": 0},
    "titleterms": {"model": 2},
}


def found(**changes):
    return list(faults({**INDEX, **changes}, {"indexed": {"loss scale": "loss-scaling"}, "unsearched": ["models"]}))


def test_a_term_that_leads_elsewhere_or_nowhere_and_a_page_that_is_searched_are_faults():
    assert found() == []
    assert "finds []" in found(indexentries={})[0]
    assert "finds ['gluon']" in found(indexentries={"loss scale": [[2, "", True]]})[0]
    assert "models should not be searched" in found(terms={"scale": [0, 1]})[0]
    assert "models should not be searched" in found(titleterms={"model": 1})[0]


def test_a_search_for_loss_scale_finds_the_page_on_loss_scaling():
    conf = runpy.run_path(str(CONF))
    assert conf["indexed"]["loss scale"] == "loss-scaling"
    assert {f"{page}.md" for page in conf["indexed"].values()} <= {path.name for path in CONF.parent.glob("*.md")}
