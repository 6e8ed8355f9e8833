"""The one command: it lists what there is, runs it, and says what it does not know."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import dev
import pytest
from support.options import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("scripts/**/*.md"), *ROOT.glob("mxmp/**/*.py")]


def test_every_command_is_listed_in_a_line_and_its_module_exists(capsys):
    assert dev.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name, (where, does) in dev.COMMANDS.items():
        assert f"{name:22} {does}" in listed
        module, _, function = where.partition(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        assert f"def {function or 'main'}(" in source


def test_a_group_lists_its_commands(capsys):
    assert dev.main(["check", "--list"]) == dev.main(["check"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"check"}


@pytest.mark.parametrize("given", [["bench", "layout"], ["bnch", "layouts"], ["nothing"]])
def test_an_unknown_command_is_an_error_that_names_the_nearest(given, capsys):
    assert dev.main(given) == 2
    said = capsys.readouterr().err
    assert repr(" ".join(given)) in said
    assert ("did you mean 'bench layouts'?" in said) == (given != ["nothing"])
    assert "--list" in said


def test_commands_that_the_manual_and_the_code_cite_exist():
    cited = {match for page in PAGES for match in re.findall(r"dev\.py((?: [a-z][a-z-]*){1,2})", page.read_text())}
    assert len(cited) > 15
    for words in (each.split() for each in cited):
        assert words[0] in dev.COMMANDS or " ".join(words) in dev.COMMANDS


def test_a_command_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "dev.py"), "parity", "--list"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("alexnet ")


@pytest.mark.parametrize("name", [name for name in dev.COMMANDS if name.startswith("pages ")])
def test_a_page_is_not_written_by_a_command_that_is_wrong(name, capsys):
    with pytest.raises(SystemExit):
        dev.main([*name.split(), "--nothing"])
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err


def test_options_take_the_type_of_their_default(tmp_path, capsys):
    options = {"rounds": 9, "rate": (0.5, "help"), "dtype": ("a", "", ("a", "b")), "folder": tmp_path}
    many = {"sizes": [1, 2], "names": ([str], "none is all"), "seeds": ([int], ""), "again": False, "batch": (int, "")}
    found = parse("doc", [], "names", **options, **many)
    assert vars(found) == {"rounds": 9, "rate": 0.5, "dtype": "a", "folder": tmp_path, "sizes": [1, 2], "names": [],
                           "seeds": None, "again": False, "batch": None}  # fmt: skip
    found = parse("doc", ["x", "y", "--seeds", "1", "2", "--again", "--batch", "8"], "names", **options, **many)
    assert (found.names, found.seeds, found.again, found.batch) == (["x", "y"], [1, 2], True, 8)
    for wrong in (["--dtype", "c"], ["--rounds", "many"], ["--nothing"]):
        with pytest.raises(SystemExit):
            parse("doc", wrong, "names", **options, **many)
    assert "invalid choice: 'c' (choose from 'a', 'b')" in capsys.readouterr().err
