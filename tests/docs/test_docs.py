"""The documentation holds: its Python runs, its links lead somewhere, and it names every public name.

The ``python`` blocks of a page run in order in one namespace, README's each in its own, in an empty folder, with
warnings as errors. A block marked ``python no-run`` is only compiled.
"""

import logging
import multiprocessing
import os
import re
import runpy
import warnings
from pathlib import Path

import pytest

import mxmp

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
SITE = {"docs/index.md": "{include} {toctree}", "docs/reference.md": "{eval-rst}"}  # what only Sphinx understands
BLOCK = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"\b(?:examples|scripts|tests|docs|mxmp)/[\w/.-]+\.(?:py|sh|md|npz)\b")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """(language, flags, code, first line) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield found[1] or "", found[2].strip(), found[3], text.count("\n", 0, found.start()) + 2


@pytest.fixture
def _apart(tmp_path, monkeypatch):
    """An empty current folder; environment variables and the level of the log that a page sets end with it."""
    before, log = dict(os.environ), logging.getLogger("mxmp")
    level = log.level
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)
    log.setLevel(level)


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_of_the_page_runs(page):
    if "mx.profiler.dump()" not in page.read_text(encoding="utf-8"):
        return run(page)
    # After dump() a process cannot always configure MXNet's profiler again (thread_group.h: auto_remove_).
    process = multiprocessing.get_context("spawn").Process(target=run_strictly, args=(page,))
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback stands in the captured stderr"


def run_strictly(page):
    warnings.simplefilter("error")
    run(page)


def run(page):
    namespace = {"__name__": "__main__"}
    for language, flags, code, line in blocks(page):
        if language != "python":
            continue
        if page == README:
            namespace = {"__name__": "__main__"}
        compiled = compile("\n" * (line - 1) + code, name_of(page), "exec")
        if flags != "no-run":
            exec(compiled, namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_marked(page):
    for language, flags, _, line in blocks(page):
        if flags.startswith("{"):
            assert flags.split()[0] in SITE.get(name_of(page), "").split(), f"line {line}: {flags!r}"
            continue
        assert language in ("python", "console", "text"), f"line {line}: {language!r}"
        assert flags in ("", "no-run"), f"line {line}: {flags!r}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "mxmp").rglob("*.md")], ids=name_of)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    prose = CODE.sub("code", BLOCK.sub("", text))
    for target in LINK.findall(prose):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target
    for file in FILE.findall(text):
        assert (ROOT / file).exists(), file


def anchors(page):
    """The fragments that headings of a page give, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_first_screen_of_the_readme_has_the_code_the_claim_and_what_was_not_tried():
    screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:35])
    for part in ("```python\n", "mxmp.convert(", "mxmp.Trainer(", "**Tried on CPUs:**", "**Not tried on a GPU:**"):
        assert part in screen


@pytest.mark.usefixtures("_apart")
def test_the_readme_shows_what_its_first_code_prints(capsys):
    code, shown = (next(code for lang, _, code, _ in blocks(README) if lang == kind) for kind in ("python", "text"))
    exec(code, {"__name__": "__main__"})
    printed = capsys.readouterr().out
    emulated, *lines, rest = shown.splitlines()
    assert emulated.startswith("float16 is emulated on a CPU")  # logged, once in a process
    assert rest.strip() == "…"
    for line, real in zip(lines, re.sub(r"hybridsequential\d+", "hybridsequential0", printed).splitlines()):
        assert real == line or ("…" in line and real.startswith(line.rstrip(" …")))


def test_the_readme_shows_both_frontends():
    found = "".join(code for language, _, code, _ in blocks(README) if language == "python")
    assert all(f"mxmp.{name}(" in found for name in ("convert", "Trainer", "Module", "cast_symbol"))


def test_every_page_is_in_the_index_and_the_site_has_the_same_sections():
    index, site = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("README.md", "index.md"))
    linked = [[LINK.search(row)[1][:-3] for row in table.splitlines() if "](" in row] for table in tables(index)]
    listed = [code.strip().split("\n\n")[1].split() for code in re.findall(r"{toctree}\n(.*?)```", site, re.DOTALL)]
    assert linked == listed
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README", "index"} == {
        page for section in listed for page in section
    }
    assert "Measurements" in site.split("```{toctree}")[-1]
    assert sorted(listed[-1][1:]) == runpy.run_path(str(ROOT / "docs" / "conf.py"))["unsearched"]


def tables(text):
    """The tables of a page, each with its head."""
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


def claims():
    """Paragraphs and lines with figures that stand in the pages which they link to."""
    readme = README.read_text(encoding="utf-8")
    yield README, readme.split("**Tried on CPUs:**")[1].split("**")[0]
    page = ROOT / "docs" / "measurements.md"
    lines = re.split(r"^\d+\. ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(lines) == 10
    yield from ((page, line) for line in lines)


@pytest.mark.parametrize(("page", "claim"), list(claims()))
def test_figures_that_a_page_quotes_stand_in_the_pages_that_it_links_to(page, claim):
    claim = " ".join(claim.split())
    texts = {}
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", claim):
        text = (page.parent / target.split("#")[0]).read_text(encoding="utf-8")
        texts[target] = " ".join(text.replace("*", "").split())
        assert not re.search(r"\d", label) or label in texts[target], label
    said = re.sub(r"ResNet-50|FP32|float16|float32|AVX512-BF16|\]\(.*?\)", "", claim)
    found = " ".join(texts.values())
    figures = re.findall(r"\d[\d.]*\b", said)
    assert [each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\.?\d)", found)] == []


@pytest.mark.parametrize("name", mxmp.__all__)
def test_every_public_name_is_documented(name):
    reference = ROOT / "docs" / "reference.md"
    assert re.search(rf"^\.\. auto\w+:: mxmp\.{name}$", reference.read_text("utf-8"), re.MULTILINE)
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md") if page != reference)
    assert re.search(rf"\b{name}\b", text)


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if page.name not in ("README.md", "index.md")], ids=name_of
)
def test_a_page_says_first_what_it_answers(page):
    first = page.read_text(encoding="utf-8").split("\n# ")[-1].split("\n\n")[1]
    assert first.startswith(("This page answers: ", "This page says in ten lines ")), first
