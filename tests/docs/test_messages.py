"""Error messages that the manual quotes are those that the code prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mxmp

ROOT = Path(mxmp.__file__).parents[1]
ROW = re.compile(r"^\| `+ ?(.+?) ?`+(?: \([^|]*\))? \|", flags=re.MULTILINE)
NOT_OURS = (
    "module 'numpy' has no attribute",
    "np.PZERO",
    "libcuda",
    "libcudart",
    "Package 'mxmp' requires",
    "Deferred initialization failed",
    "CachedOp does not support higher order gradients",
    "is non-differentiable",
    "Unknown input to HybridBlock",
    "Incompatible attr in node",
    "is not used by any computation",
    "must not be hybridized to print summary",
    "Please first call block.hybridize()",
    "dtype incompatible expected",
    "misaligned address",
    "Segmentation fault",
    "InferShape pass cannot decide shapes",
    "InferType pass cannot decide dtypes",
)


def quoted():
    """Every message in the first column of a table of the troubleshooting page."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [message for cell in ROW.findall(text) for message in cell.split("`, `")]
    return [m for m in messages if not any(other in m for other in NOT_OURS)]


def source():
    """The package's string literals, joined as Python joins them, fields of f-strings as one sign."""
    found = []
    for path in sorted(Path(mxmp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


LITERALS = [literal.replace("`", "") for literal in source()]


TOKEN = re.compile(r"\[?\.\.\.\]?|'[^']*'|[\w./]+|\s+|.")


def said_by_the_code(message):
    """Whether a literal can print the message: any of its words may come from a field, "..." is anything."""
    pattern = ""
    for token in TOKEN.findall(message):
        if "..." in token:
            pattern += ".*?"
        elif re.match(r"[\w']", token):
            pattern += rf"(?:{re.escape(token)}|\0[\0.]*)"
        else:
            pattern += r"\s+" if token.isspace() else re.escape(token)
    # A literal that is hardly more than fields says anything: a third of the message must be its own text.
    for literal in LITERALS:
        found = re.search(pattern, literal)
        if found and len(found[0].replace("\0", "").strip()) * 3 >= len(message.replace("...", "").strip()):
            return True
    return False


@pytest.mark.parametrize("message", quoted())
def test_messages_quoted_in_the_manual_are_those_of_the_code(message):
    assert said_by_the_code(message)
