"""The site of this manual: `bash scripts/docs.sh` builds it into docs/_build/html."""

import mxmp

project = "mxmp"
author = "the authors of mxmp"
release = version = mxmp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "README.md"]  # README.md is part of index.md
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
