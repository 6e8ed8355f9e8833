"""The check of names and docstrings: it finds nothing in mxmp/, and finds what it is for."""

from __future__ import annotations

from checks.words import MOST, line_counts, main, offenders, public_names

CODE = '''"""A module."""


class Long:
    """One.

    Two.
    """

    def told(self):
        """One.
        Two.
        """


def shown():
    task = note_2 = _foreignX = 1  # asked

    def within():
        """One.
        Two.
        Three."""


def api():
    """One.

    Two.
    """
'''


def test_mxmp_has_no_private_word_and_no_long_docstring(capsys):
    assert main([]) == 0, capsys.readouterr().out
    documentation, code = line_counts()
    assert 0 < documentation <= MOST * code


def test_it_finds_a_private_word_a_long_docstring_and_a_public_name_without_one(tmp_path):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "door.py").write_text(CODE)
    (package / "long.py").write_text('"""One.' + "\n\n" * 6 + '"""\n')
    public = {("planted.door", "shown"): False, ("planted.door", "api"): True}
    assert [tuple(each) for each in offenders(package, public)] == [
        ("planted/door.py", "name", "door"),
        ("planted/door.py:10", "name", "told"),
        ("planted/door.py:17", "name", "_foreignX"),
        ("planted/door.py:4", "docstring", "Long is internal and has 4 lines"),
        ("planted/door.py:16", "docstring", "shown is public and has none"),
        ("planted/long.py", "docstring", "the module's has 13 lines"),
    ]
    assert line_counts(package) == (28, 6)


def test_public_are_the_names_of_the_api_with_what_they_hold_and_inherit():
    public = public_names()
    assert all(public.values())
    for module, name in [
        ("mxmp.gluon.trainer", "Trainer.step"),
        ("mxmp.diagnose.explaining", "NodeReport"),  # a field of a report
        ("mxmp.diagnose.advising.advice", "MatrixReport.paddings"),
        ("mxmp.diagnose.networks.probe", "StepObserver.close"),  # inherited by Watch
    ]:
        assert (module, name) in public
    internal = {"mxmp.pipeline", "mxmp.precision.decide", "mxmp.kernels.fit", "mxmp.step.updater"}
    assert internal.isdisjoint(module for module, _ in public)
    assert not [name for _, name in public if name.rpartition(".")[2] == "_forget"]
