"""Files that are damaged, of another kind or absurd: a report or one line that says what is wrong, no traceback."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import mxnet as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.exports import TABLES, write_database

from mxmp import Plan, explain
from mxmp.__main__ import main
from mxmp.diagnose import advise, profile


def check(path):
    """Either all of the report works, or the error is one line."""
    found = None
    try:
        found = profile(str(path))
    except (ValueError, OSError) as error:
        lines = str(error).split("\n")
    if found is None:
        assert len(lines) == 1
        assert lines[0]
    else:
        str(found).encode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="fc").save(str(tmp_path / "net-symbol.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- Fuzz -------------------------------------------------------------------------------------------

CELLS = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
)
FUZZ = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(list(TABLES)), st.integers(0, 9), st.integers(0, 9), CELLS), max_size=3))
def test_databases_with_anything_in_their_cells(changes):
    with tempfile.TemporaryDirectory() as folder:
        check(write_database(os.path.join(folder, "report.sqlite"), changes))


@FUZZ
@given(data=st.data())
def test_files_with_bytes_changed(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        good = Path(write_database(os.path.join(folder, "good.sqlite"))).read_bytes()
        at = data.draw(st.integers(0, len(good)))
        count = data.draw(st.sampled_from([0, 1, 5, len(good)]))
        path.write_bytes(good[:at] + data.draw(st.binary(max_size=8)) + good[at + count :])
        check(path)


# -- What was found ---------------------------------------------------------------------------------

DEEP = "[" * 100_000
KERNEL, RUNTIME, NVTX, NAMES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
DATABASES = {
    "a kernel without an end": ((KERNEL, 0, 1, None), f"column end of {KERNEL} must hold int, got None"),
    "a kernel that begins with text": ((KERNEL, 0, 0, "x"), f"column start of {KERNEL} must hold int, got 'x'"),
    "a kernel on a blob": ((KERNEL, 0, 2, b"x"), f"column deviceId of {KERNEL} must hold int, got b'x'"),
    "a kernel that ends first": ((KERNEL, 0, 1, 3), "ends at 3, before it begins at 10"),
    "a name that is a blob": ((NAMES, 0, 1, b"x"), f"column value of {NAMES} must hold str, got b'x'"),
    "a range's name that is a blob": ((NVTX, 0, 3, b"x"), f"column text of {NVTX} must hold str, got b'x'"),
    "a range's end that is text": ((NVTX, 0, 1, "x"), f"column end of {NVTX} must hold int, got 'x'"),
    "a thread that is a blob": ((NVTX, 0, 4, b"x"), f"column globalTid of {NVTX} must hold int, got b'x'"),
    "a launch without a time": ((RUNTIME, 0, 0, None), f"column start of {RUNTIME} must hold int, got None"),
}


@pytest.mark.parametrize("case", DATABASES)
def test_a_broken_database_is_one_line(folder, capsys, case):
    change, message = DATABASES[case]
    write_database("report.sqlite", [change])
    assert_one_line(capsys, message, "profile", "report.sqlite")


@pytest.mark.parametrize("change", [(NVTX, 1, 1, None), (NVTX, 1, 4, None), (RUNTIME, 0, 2, None)])
def test_an_open_range_and_an_unknown_thread_are_in_nvidias_schema(folder, change):
    write_database("report.sqlite", [change])
    operators = {kernel.name: kernel.operator for kernel in profile("report.sqlite").kernels}
    assert operators["volta_h884gemm_64x64"] == ("step" if change[0] == NVTX else "")


def test_names_that_are_not_utf8_are_printed(folder):
    write_database("report.sqlite")
    with closing(sqlite3.connect("report.sqlite")) as database:
        database.execute("UPDATE StringIds SET value = CAST(x'ff616263' AS TEXT) WHERE id = 1")
        database.commit()
    assert "\ufffdabc" in {kernel.name for kernel in profile("report.sqlite").kernels}


# -- The command line -------------------------------------------------------------------------------

GRAPHS = {
    "no nodes": {"nodes": [], "heads": [], "arg_nodes": []},
    "no heads": {"nodes": [{"op": "null", "name": "x", "inputs": []}], "heads": [], "arg_nodes": [0]},
    "a head too many": {"nodes": [{"op": "null", "name": "x", "inputs": []}], "heads": [[7, 0, 0]]},
    "itself for an input": {"nodes": [{"op": "relu", "name": "x", "inputs": [[0, 0, 0]]}], "heads": [[0, 0, 0]]},
    "a node that is a number": {"nodes": [3], "heads": [[0, 0, 0]]},
    "a node without an operator": {"nodes": [{"name": "x", "inputs": []}], "heads": [[0, 0, 0]]},
    "nodes that are a number": {"nodes": 3},
    "a list": [],
    "an output too many": {
        "nodes": [{"op": "null", "name": "x", "inputs": []}, {"op": "relu", "name": "y", "inputs": [[0, 1, 0]]}],
        "heads": [[1, 0, 0]],
    },
    "an input too few": {"nodes": [{"op": "elemwise_add", "name": "x", "inputs": []}], "heads": [[0, 0, 0]]},
}


@pytest.mark.parametrize("case", GRAPHS)
def test_a_broken_graph_is_one_line_and_crashes_nothing(folder, capsys, case):
    """MXNet's own reader ends the process on some of them."""
    (folder / "bad-symbol.json").write_text(json.dumps(GRAPHS[case]))
    for command in (["explain"], ["advise"]):
        assert_one_line(capsys, "is no Symbol in JSON, or it is damaged", *command, "bad-symbol.json")


SHAPES = [
    "data=99999999999999999999,3",
    "data=2147483648,3",
    f"data={'9' * 5000},3",
    "data=" + "2000000000," * 2 + "3e9",
]
SHAPES += ["data=2147483647,2147483647,2147483647", "data=4294967297,3"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[:24])
@pytest.mark.parametrize(
    "command", [["explain"], ["advise"], ["tune", "--out", "plan.json", "--no-cache"]], ids=" ".join
)
def test_a_shape_that_is_too_large_is_one_line(folder, capsys, command, shape):
    message = "--shape" if "9" * 20 in shape or "e" in shape else "is too large for MXNet: a size is at most"
    assert_one_line(capsys, message, *command, "net-symbol.json", "--shape", shape)


@pytest.mark.parametrize("shape", ["data=4,7,x", "data=", "data=4,-6", "data=0,6", "=4,6", "data"])
def test_a_shape_that_is_none_is_one_line(folder, capsys, shape):
    assert_one_line(capsys, shape, "explain", "net-symbol.json", "--shape", shape)


@pytest.mark.parametrize("command", [["explain"], ["advise"], ["tune", "--out", "plan.json"]], ids=" ".join)
def test_a_shape_of_an_input_with_the_name_of_an_argument_is_one_line_that_names_both(folder, capsys, command):
    mx.sym.FullyConnected(mx.sym.var("target"), num_hidden=2).save("target-symbol.json")
    for message in ("'target'", f"mxmp.{command[0]}"):
        assert_one_line(capsys, message, *command, "target-symbol.json", "--shape", "target=4,6")


def test_a_folder_that_no_one_may_write_to_is_named_and_so_is_one_in_the_place_of_a_file(folder, capsys):
    assert_one_line(capsys, "/proc", "cast", "net-symbol.json", "/proc/low")
    (folder / "low-symbol.json").mkdir()
    assert_one_line(capsys, "low-symbol.json", "cast", "net-symbol.json", "low")


def test_shapes_that_are_too_large_are_refused_in_python_too():
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8)
    for call in (explain, advise):
        with pytest.raises(ValueError, match="too large for MXNet: a size is at most 2,147,483,647"):
            call(symbol, data=(2**31, 3))


def test_more_than_the_memory_is_one_line(folder, capsys):
    tune = ["tune", "net-symbol.json", "--out", "plan.json", "--no-cache"]
    assert_one_line(capsys, "Unable to allocate", *tune, "--shape", "data=2000000000,20000")


WHERE = {
    "explain": ["explain", "@"],
    "cast": ["cast", "@", "low"],
    "advise": ["advise", "@"],
    "profile": ["profile", "@"],
    "policy": ["explain", "net-symbol.json", "--policy", "@"],
}
CONTENTS = {
    "deep": DEEP.encode(),
    "deep object": b'{"nodes": ' + DEEP.encode(),
    "empty": b"",
    "latin": b'{"nodes": ["\xff"]}',
    "NUL": bytes(100),
    "a list": b"[]",
    "null": b"null",
    "a folder": None,
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", WHERE)
def test_any_file_in_any_place_is_one_line_that_names_it(folder, capsys, command, content):
    raw = CONTENTS[content]
    if raw is None:
        (folder / "bad.json").mkdir()
    else:
        (folder / "bad.json").write_bytes(raw)
    before = sorted(os.listdir(folder))
    assert_one_line(capsys, "bad.json", *(word.replace("@", "bad.json") for word in WHERE[command]))
    assert sorted(os.listdir(folder)) == before


def test_a_deep_plan_is_a_value_error(folder):
    (folder / "plan.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"'plan.json': not a precision plan"):
        Plan.load("plan.json")


def assert_one_line(capsys, message, *arguments):
    assert main(list(arguments)) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"python -m mxmp {arguments[0]}: ")
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert ".part" not in error
    assert "Check failed" not in error
    assert out == ""
