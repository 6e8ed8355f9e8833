"""Checks the search of the built manual: docs/conf.py names the page for each term, and the pages that it leaves out.

Sphinx's search ranks a page whose index has exactly the term with 100, a title with 15 and an attribute with 16.
"""

from __future__ import annotations

import json
import runpy
from typing import Iterator

from support.options import parse
from support.results import DOCS


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    text = (DOCS / "_build" / "html" / "searchindex.js").read_text(encoding="utf-8")
    found = list(
        faults(json.loads(text[text.index("{") : text.rindex("}") + 1]), runpy.run_path(str(DOCS / "conf.py")))
    )
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def faults(index: dict, conf: dict) -> Iterator[str]:
    """Yield what is wrong with a search index.

    Parameters
    ----------
    index : dict
        Sphinx's: docnames, indexentries, terms...
    conf : dict
        The names of docs/conf.py: ``indexed``, a page for each term, and ``unsearched``, a list of pages.
    """
    pages = index["docnames"]
    for term, page in conf["indexed"].items():
        places = [pages[number] for number, _, is_main in index["indexentries"].get(term, ()) if is_main]
        if places != [page]:
            yield f"a search for {term!r} should find {page} first, and finds {places}"
    for term, numbers in {**index["terms"], **index["titleterms"]}.items():
        hidden = {pages[number] for number in ([numbers] if isinstance(numbers, int) else numbers)}
        for page in sorted(hidden.intersection(conf["unsearched"])):
            yield f"{page} should not be searched, and {term!r} finds it"
