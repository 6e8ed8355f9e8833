"""Checks the search of the built manual: docs/conf.py names the place for each term, and the pages that it leaves out.

Sphinx's search ranks a page whose index has exactly the term with 100, a title with 15 and an attribute with 16. So the
first result is the place of the term's entry, if there is one.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Iterator

from support.options import parse
from support.results import DOCS

# What users type, and where its answer is.
QUESTIONS = {
    "gradient accumulation": "gluon#gradient-accumulation",
    "freeze layers": "gluon#fine-tuning-freezing",
    "resume": "gluon#saving-and-resuming",
    "nan loss": "when-it-does-not-work#the-loss-is-nan-or-inf",
    "clip gradients": "gluon#clipping",
    "multi gpu": "gluon#several-devices",
    "int8 export": "inference",
    "custom op": "gluon#custom-operators",
    "slow": "when-it-does-not-work#it-is-not-faster",
    "amp migrate": "migrating#from-mxnetcontribamp",
}


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    html = DOCS / "_build" / "html"
    text = (html / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    conf = runpy.run_path(str(DOCS / "conf.py"))
    found = [*faults(index, conf), *lost(conf["indexed"], html)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def faults(index: dict, conf: dict) -> Iterator[str]:
    """Yield what is wrong with a search index.

    Parameters
    ----------
    index : dict
        Sphinx's: docnames, indexentries, terms...
    conf : dict
        The names of docs/conf.py: ``indexed``, a page or ``page#section`` for each term, and ``unsearched``, a list of
        pages.
    """
    pages = index["docnames"]
    for term, place in {**conf["indexed"], **QUESTIONS}.items():
        entries = index["indexentries"].get(term, ())
        places = ["#".join(filter(None, (pages[number], name))) for number, name, is_main in entries if is_main]
        if places != [place]:
            yield f"a search for {term!r} should find {place} first, and finds {places}"
    for term, numbers in {**index["terms"], **index["titleterms"]}.items():
        hidden = {pages[number] for number in ([numbers] if isinstance(numbers, int) else numbers)}
        for page in sorted(hidden.intersection(conf["unsearched"])):
            yield f"{page} should not be searched, and {term!r} finds it"


def lost(indexed: dict[str, str], html: Path) -> Iterator[str]:
    """Yield the places of terms that the built pages do not have."""
    for place in sorted(set(indexed.values())):
        page, _, section = place.partition("#")
        path = html / f"{page}.html"
        if not path.exists() or (section and f'id="{section}"' not in path.read_text(encoding="utf-8")):
            yield f"{place}: there is no such page or section"
