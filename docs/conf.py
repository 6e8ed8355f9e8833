"""The site of this manual: `bash scripts/docs.sh` builds it into docs/_build/html."""

import mxmp

project = "mxmp"
author = "the authors of mxmp"
release = version = mxmp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "README.md"]  # README.md is part of index.md
# The pages of measurements are long tables, which would hide the manual in a search: measurements.md leads to them.
unsearched = ["benchmarks", "gpu-graphs", "kernels", "model-benchmarks", "models", "parity"]
# Terms and the page that a search shows first for them; a title alone ranks below an attribute of the same name.
indexed = {
    "accuracy": "when-it-does-not-work",
    "bfloat16": "choosing-a-dtype",
    "cast": "graph-changes",
    "checkpoint": "gluon",
    "command line": "command-line",
    "exclude": "policies",
    "float16": "choosing-a-dtype",
    "gradient clipping": "gluon",
    "install": "getting-started",
    "loss scale": "loss-scaling",
    "loss scaling": "loss-scaling",
    "nan": "when-it-does-not-work",
    "overflow": "loss-scaling",
    "plan": "policies",
    "policy": "policies",
    "recipe": "policies",
    "rule": "rules",
    "underflow": "looking-inside",
}
myst_heading_anchors = 3  # as GitHub's, so that the pages' links hold in both places

# The reference shows mxmp's own docstrings; those that MXNet's base classes hand down are not in this format.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"mxmp {release}"
html_copy_source = False
html_show_copyright = False


def setup(app):
    app.connect("doctree-read", index_terms)
    app.connect("env-updated", leave_out_of_search)


def index_terms(app, doctree):
    """Put the page's terms into the index, and so at the top of a search for them."""
    from sphinx import addnodes

    entries = [("single", term, "", "main", None) for term, page in indexed.items() if page == app.env.docname]
    if entries:
        doctree.insert(0, addnodes.index(entries=entries))


def leave_out_of_search(app, env):
    """Mark the pages of measurements as Sphinx's ``:no-search:`` field would, which GitHub would show as text."""
    for page in unsearched:
        env.metadata[page]["nosearch"] = True
