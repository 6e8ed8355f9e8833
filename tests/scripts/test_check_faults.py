"""The table of faults, and how one is planted; that the tests notice each: ``dev.py check faults``."""

import pytest
from checks import faults
from checks.fault_table import FAULTS, Fault
from support.results import ROOT


def test_each_fault_has_a_name_of_its_own():
    assert len({faults.name_of(fault) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=faults.name_of)
def test_a_fault_can_be_planted_in_the_file_of_today_and_its_tests_exist(fault):
    assert (ROOT / "mxmp" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert all((ROOT / "tests" / name).is_file() for name in fault.tests.split())


@pytest.mark.parametrize(
    ("ended", "found", "is_caught"),
    [
        (({"failed": "tests/x.py::test"}, ""), "tests/x.py::test", True),
        (({}, "the process ended by SIGSEGV"), "the process ended by SIGSEGV", True),
        (({}, "took longer than 600 s"), "took longer than 600 s", False),
        (({"code": 0}, ""), faults.MISSED, False),
    ],
)
def test_a_fault_is_planted_in_the_copy_and_taken_out_again(ended, found, is_caught, tmp_path, monkeypatch):
    file = tmp_path / "mxmp" / "x.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    seen = []
    monkeypatch.setattr(faults, "in_a_process", lambda *arguments: seen.append(file.read_text()) or ended)
    assert faults.planted(Fault("x.py", "1", "2", "x.py"), tmp_path) == found
    assert (seen, file.read_text()) == (["a = 2\n"], "a = 1\n")
    assert faults.is_test(found) == is_caught


@pytest.mark.parametrize("text", ["a = 3\n", "a = 1 + 1\n"])
def test_a_line_that_is_another_one_by_now_or_stands_twice_is_said_to_be(text, tmp_path):
    file = tmp_path / "mxmp" / "x.py"
    file.parent.mkdir()
    file.write_text(text)
    assert faults.planted(Fault("x.py", "1", "2", "x.py"), tmp_path) == faults.NOT_THERE


def test_tests_that_pytest_cannot_run_are_an_error(tmp_path, monkeypatch):
    file = tmp_path / "mxmp" / "x.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    monkeypatch.setattr(faults, "in_a_process", lambda *arguments: ({"code": 4}, ""))
    with pytest.raises(RuntimeError, match=r"x\.py: pytest ended with 4"):
        faults.planted(Fault("x.py", "1", "2", "x.py"), tmp_path)
    assert file.read_text() == "a = 1\n"
