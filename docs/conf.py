"""The site of this manual: `bash scripts/docs.sh` builds it into docs/_build/html."""

import mxmp

project = "mxmp"
author = "the authors of mxmp"
release = version = mxmp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "README.md"]  # README.md is part of index.md
# The pages of measurements are long tables, which would hide the manual in a search: measurements.md leads to them.
unsearched = ["benchmarks", "gpu-graphs", "kernels", "model-benchmarks", "models", "parity"]
# What users type into the search, and the page or section that comes first; without it a title ranks below an attribute
# of the same name. `python scripts/dev.py check site` compares the built index.
indexed = {
    "accuracy": "when-it-does-not-work#accuracy-is-lower-than-in-fp32",
    "accumulate gradients": "gluon#gradient-accumulation",
    "accumulation": "gluon#gradient-accumulation",
    "amp migrate": "migrating#from-mxnetcontribamp",
    "amp": "migrating#from-mxnetcontribamp",
    "apex": "migrating#from-apex-and-torchamp",
    "average weights": "gluon#moving-averages-of-weights-ema",
    "averaged weights": "gluon#moving-averages-of-weights-ema",
    "bfloat16": "choosing-a-dtype",
    "cast": "graph-changes",
    "checkpoint": "gluon#saving-and-resuming",
    "clip gradients": "gluon#clipping",
    "clipping": "gluon#clipping",
    "command line": "command-line",
    "contrib.amp": "migrating#from-mxnetcontribamp",
    "custom op": "gluon#custom-operators",
    "custom operator": "gluon#custom-operators",
    "dataloader workers": "gluon#batches-of-a-dataloader-with-workers",
    "dataloader": "gluon#batches-of-a-dataloader-with-workers",
    "discard": "gluon#rejecting-a-step",
    "distributed": "gluon#several-machines",
    "ema": "gluon#moving-averages-of-weights-ema",
    "exclude": "policies",
    "export": "inference",
    "fine-tuning": "gluon#fine-tuning-freezing",
    "float16": "choosing-a-dtype",
    "freeze layers": "gluon#fine-tuning-freezing",
    "freeze": "gluon#fine-tuning-freezing",
    "gradient accumulation": "gluon#gradient-accumulation",
    "gradient clipping": "gluon#clipping",
    "horovod": "gluon#several-machines",
    "inf": "when-it-does-not-work#the-loss-is-nan-or-inf",
    "install": "getting-started#install",
    "int8 export": "inference",
    "int8": "inference",
    "learning rate schedule": "gluon#learning-rate-schedules",
    "leave out a step": "gluon#rejecting-a-step",
    "load_checkpoint": "symbolic#resuming-a-module-exactly",
    "loss scale": "loss-scaling",
    "loss scaling": "loss-scaling",
    "memory": "when-it-does-not-work#memory-is-not-halved",
    "migrate amp": "migrating#from-mxnetcontribamp",
    "migrate": "migrating",
    "moving average": "gluon#moving-averages-of-weights-ema",
    "multi gpu": "gluon#several-devices",
    "multi-gpu": "gluon#several-devices",
    "multiple gpus": "gluon#several-devices",
    "nan loss": "when-it-does-not-work#the-loss-is-nan-or-inf",
    "nan": "when-it-does-not-work#the-loss-is-nan-or-inf",
    "not faster": "when-it-does-not-work#it-is-not-faster",
    "overflow": "loss-scaling",
    "plan": "policies#plans",
    "policy": "policies",
    "pretrained": "gluon#fine-tuning-freezing",
    "recipe": "policies#recipes",
    "reject a step": "gluon#rejecting-a-step",
    "resume a module": "symbolic#resuming-a-module-exactly",
    "resume": "gluon#saving-and-resuming",
    "rule": "rules",
    "save": "gluon#saving-and-resuming",
    "seed": "gluon#the-same-beginning-as-an-fp32-net",
    "skip a step": "gluon#rejecting-a-step",
    "skipped step": "when-it-does-not-work#the-loss-scale-falls",
    "slow": "when-it-does-not-work#it-is-not-faster",
    "stability": "reference#what-is-public-and-for-how-long",
    "sum gradients": "gluon#summing-gradients-yourself",
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
html_static_path = ["_static"]
html_css_files = ["mxmp.css"]


def setup(app):
    app.connect("doctree-read", index_terms)
    app.connect("env-updated", leave_out_of_search)
    app.connect("html-page-context", excerpts_of_search)
    app.connect("build-finished", write_excerpts)


def index_terms(app, doctree):
    """Put the page's terms into the index, and so at the top of a search for them, with the section to go to."""
    from sphinx import addnodes

    found = [(term, *place.split("#")) for term, place in indexed.items() if place.split("#")[0] == app.env.docname]
    if found:
        entries = [("single", term, "".join(section), "main", None) for term, _, *section in found]
        doctree.insert(0, addnodes.index(entries=entries))


def leave_out_of_search(app, env):
    """Mark the pages of measurements as Sphinx's ``:no-search:`` field would, which GitHub would show as text."""
    for page in unsearched:
        env.metadata[page]["nosearch"] = True


def excerpts_of_search(app, pagename, templatename, context, doctree):
    """Let the page of search read excerpts.js, which a browser can do from a folder, too."""
    if pagename == "search":
        for script in ("excerpts.js", "offline-search.js"):
            app.add_js_file(script)


def write_excerpts(app, error):
    """Write the text of every page that is searched, by its name, with its sections in HTML."""
    import html
    import json
    from pathlib import Path

    def text(node):
        if node.tagname not in ("document", "section"):
            return html.escape(node.astext())
        inside = "\n".join(map(text, node.children))
        return f'<div id="{node["ids"][0]}">{inside}</div>' if node.tagname == "section" else inside

    if error or app.builder.name != "html":
        return
    pages = sorted(app.env.found_docs.difference(unsearched))
    texts = {page: text(app.env.get_doctree(page)) for page in pages}
    path = Path(app.outdir) / "_static" / "excerpts.js"
    path.write_text(f"window.excerpts = {json.dumps(texts)};\n", encoding="utf-8")
