"""What the manual says about the code is so: extras, commands and their options, keywords, tables."""

from __future__ import annotations

import argparse
import configparser
import inspect
import re
from pathlib import Path

import mxnet as mx
import pytest

import mxmp
from mxmp import __main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def section(text, title):
    """The text below a heading, up to the next one of its level."""
    hashes, _, rest = re.search(rf"^(#+) ({re.escape(title)})\n(.*)", text, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^{hashes} ", rest, flags=re.MULTILINE)[0]


def extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return list(config["options.extras_require"])


@pytest.mark.parametrize(("name", "title"), [("README.md", "Start"), ("docs/getting-started.md", "Install")])
def test_every_extra_is_named_where_a_page_says_how_to_install(name, title):
    text = section(page(name), title)
    assert {extra for extra in extras() if f"`{extra}`" not in text and f"'.[{extra}]'" not in text} == set()


def commands():
    """The commands of ``python -m mxmp``: their options, and their positional arguments."""
    parser = command_line.parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, each in subparsers.choices.items():
        options = {string for action in each._actions for string in action.option_strings} - {"-h", "--help"}
        yield name, options, {action.dest.upper() for action in each._actions if not action.option_strings}


@pytest.mark.parametrize(("name", "options", "positional"), list(commands()))
def test_the_command_line_page_has_every_option_of_a_command(name, options, positional):
    text = page("docs/command-line.md")
    below = section(text, name)
    listed = "\n".join(re.split(r"^Options: ", below, flags=re.MULTILINE)[1:])
    assert set(re.findall(r"`(--[\w-]+)", listed)) == options
    assert set(re.findall(r"`([A-Z]+)`", listed)) == positional
    assert f"| [`{name}`](#{name}) |" in text
    assert f"python -m mxmp {name} " in below
    shared = section(text, "Options that several commands share")
    assert options <= set(re.findall(r"`(--[\w-]+)", shared + below))


def test_pages_name_every_command_where_they_count_them():
    names = [name for name, *_ in commands()]
    listed = section(page("docs/command-line.md"), "The command line").split("\n\n")[1]
    assert re.findall(r"\[`(\w+)`\]", listed) == names
    assert all(f"`{name}`" in section(page("docs/reference.md"), "Command line") for name in names)
    assert all(f"python -m mxmp {name} " in command_line.__doc__ for name in names)


@pytest.mark.parametrize("ours", [mxmp.Module, mxmp.BucketingModule])
def test_the_symbolic_page_counts_and_names_the_keywords_that_are_ours(ours):
    theirs = inspect.signature(getattr(mx.mod, ours.__name__)).parameters
    added = [name for name, each in inspect.signature(ours).parameters.items()
             if name not in theirs and each.kind is each.KEYWORD_ONLY]  # fmt: skip
    text = page("docs/symbolic.md")
    (said,) = re.findall(r"(\w+) (?:more )?keywords", section(text, ours.__name__))
    assert said == NUMBERS[len(added)]
    assert all(f"`{name}`" in section(text, "Module") for name in added)


def test_the_tables_of_policies_are_those_of_the_code():
    text = page("docs/policies.md")
    fields = re.findall(r"^\| `(\w+)` \|", section(text, "The fields of a policy"), re.MULTILINE)
    assert fields == list(inspect.signature(mxmp.Policy).parameters)
    rows = re.findall(r'^\| `"([\w-]+)"` \| `([^`]+)` \|', section(text, "Recipes"), re.MULTILINE)
    assert [(name, mxmp.Policy.parse(policy)) for name, policy in rows] == [
        (name, mxmp.Policy.parse(name)) for name in mxmp.Policy.recipes()
    ]


def test_the_loss_scaling_page_has_every_argument_of_the_dynamic_scaler():
    table = section(page("docs/loss-scaling.md"), "The scalers").split("`DynamicLossScaler` takes:")[1]
    named = [name for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", cell)]
    assert named == list(inspect.signature(mxmp.DynamicLossScaler).parameters)


def test_the_version_stands_in_one_place_and_is_the_first_of_the_changelog():
    first = re.search(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", page("CHANGELOG.md"), re.MULTILINE)
    assert first[1] == mxmp.__version__
    assert re.search(r"^version = (.+)$", page("setup.cfg"), re.MULTILINE)[1] == "attr: mxmp.__version__"
