"""The count of the lines of code that a training through mxmp loads."""

from __future__ import annotations

from checks.closure import code_lines

TEXT = '''"""Docstring,
of two lines."""

import os  # counts


class A:
    """Docstring."""

    # a comment
    text = """a string
    of two lines"""

    def method(self):
        """Docstring."""
        return os.path.join(
            self.text,
        )
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert code_lines(TEXT) == 8
