"""Files that are damaged, foreign or absurd: a report or one line that says what is wrong, never a traceback."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import mxnet as mx
import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mxmp import Plan, explain
from mxmp.__main__ import main
from mxmp.diagnose import Advice, Profile, advise, load, profile

# -- Good files, to break ---------------------------------------------------------------------------

EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
    *(
        {"name": name, "cat": "operator", "ph": phase, "ts": ts, "pid": 0, "tid": 1}
        for name, begin, end in (("Convolution", 0, 30), ("Cast", 30, 40))
        for phase, ts in (("B", begin), ("E", end))
    ),
]
TABLES = {  # columns without types, so that SQLite keeps what is put in
    "StringIds": ("id, value", [(1, "volta_h884gemm_64x64"), (2, "volta_hgemm_128x64_nn"), (3, "Convolution")]),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        'start, "end", deviceId, correlationId, globalPid, demangledName',
        [(10, 30, 0, 1, 3 << 24, 1), (40, 45, 0, 2, 3 << 24, 2)],
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ('start, "end", globalTid, correlationId', [(5, 6, (3 << 24) + 7, 1)]),
    "NVTX_EVENTS": (
        'start, "end", eventType, text, globalTid, textId',
        [(0, 99, 59, "step", (3 << 24) + 7, None), (4, 8, 60, None, (3 << 24) + 7, 3)],
    ),
}
ROWS = [
    ["ID", "Kernel Name", "Device", "gpu__time_duration.sum", "sm__inst_executed_pipe_tensor.sum"],
    ["", "", "", "ns", "inst"],
    ["0", "volta_h884gemm_64x64", "0", "4,000", "12"],
    ["1", "volta_sgemm_32x32", "0", "1,000", "n/a"],
]


def write_database(path, changes=()):
    """``changes``: (table, row, column, value)."""
    Path(path).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, (columns, rows) in TABLES.items():
            database.execute(f"CREATE TABLE {table} ({columns})")
            cells = [list(row) for row in rows]
            for where, row, column, value in changes:
                if where == table:
                    cells[row % len(cells)][column % len(cells[0])] = value
            database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(cells[0]))})", cells)
        database.commit()
    return path


def table_of(rows):
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode(errors="surrogatepass")


def check(read, path):
    """Either all of the report works, or the error is one line."""
    found = None
    try:
        found = read(str(path))
    except (ValueError, OSError) as error:
        lines = str(error).split("\n")
    if found is None:
        assert len(lines) == 1
        assert lines[0]
        return
    assert isinstance(found, (Advice, Profile))
    str(found).encode()
    again = os.path.join(os.path.dirname(path), "again.json")
    found.save(again)
    assert load(again) == found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="fc").save(str(tmp_path / "net-symbol.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What ``save`` writes of each kind of report, as JSON."""
    folder = tmp_path_factory.mktemp("saved")
    word = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=9, name="fc")
    advise(mx.sym.Group([word, mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3)]), data=(3, 4)).save(
        folder / "advice.json"
    )
    (folder / "trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    profile(folder / "trace.json").save(folder / "profile.json")
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("advice", "profile")}


# -- Fuzz -------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 10**400, 2**63, 2**64]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "B", "E", "M", "operator", "tensor", "float16", "a100", "$x^{", "a\nb"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
CELLS = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
)
FUZZ = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


def places(value, path=()):
    """The paths of everything within JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def changed(data, value):
    """JSON with one or two things put in the place of others, or taken out."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(list(places(value))[1:] or [(0,)]))
        inner = value
        for key in path:
            inner = inner[key]
        if data.draw(st.integers(0, 4)) or not inner:
            inner[last] = data.draw(VALUES)
        else:
            del inner[last]
    return value


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_traces_with_anything_in_them(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps(changed(data, {"traceEvents": EVENTS})))
        check(profile, path)


@FUZZ
@given(data=st.data(), kind=st.sampled_from(["advice", "profile"]))
def test_saved_reports_with_anything_in_them(saved, data, kind):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        path.write_text(json.dumps(changed(data, saved[kind])))
        for read in (load, Advice.load, Profile.load):
            check(read, path)


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(list(TABLES)), st.integers(0, 9), st.integers(0, 9), CELLS), max_size=3))
def test_databases_with_anything_in_their_cells(changes):
    with tempfile.TemporaryDirectory() as folder:
        check(profile, write_database(os.path.join(folder, "report.sqlite"), changes))


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.text(max_size=6)), max_size=3))
def test_tables_with_anything_in_their_cells(changes):
    rows = [list(row) for row in ROWS]
    for row, column, value in changes:
        rows[row % len(rows)][column % len(rows[0])] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.csv")
        path.write_bytes(table_of(rows))
        check(profile, path)


@FUZZ
@given(data=st.data(), kind=st.sampled_from(["trace", "report", "sqlite", "csv", "nothing"]))
def test_files_with_bytes_changed(saved, data, kind):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        good = {
            "trace": lambda: json.dumps({"traceEvents": EVENTS}).encode(),
            "report": lambda: json.dumps(saved["profile"]).encode(),
            "sqlite": lambda: Path(write_database(os.path.join(folder, "good.sqlite"))).read_bytes(),
            "csv": lambda: table_of(ROWS),
            "nothing": lambda: b"",
        }[kind]()
        at = data.draw(st.integers(0, len(good)))
        count = data.draw(st.sampled_from([0, 1, 5, len(good)]))
        path.write_bytes(good[:at] + data.draw(st.binary(max_size=8)) + good[at + count :])
        for read in (profile, load):
            check(read, path)


# -- What was found ---------------------------------------------------------------------------------


def events(*more):
    return json.dumps({"traceEvents": [*EVENTS, *more]})


def event(**changes):
    return {"name": "Convolution", "cat": "operator", "ph": "B", "ts": 50, "pid": 0, "tid": 1, **changes}


DEEP = "[" * 100_000
TRACES = {
    "deep": ('{"traceEvents": ' + DEEP, "nested too deeply"),
    "deep and whole": ('{"traceEvents": ' + DEEP + "]" * 100_000 + "}", "nested too deeply"),
    "no list": ('{"traceEvents": {"name": 1}}', "no list of 'traceEvents'"),
    "a number": (events(7), "traceEvents[5] must be an object, got 7"),
    "without a name": (events({"cat": "operator", "ph": "B"}), "'name' of traceEvents[5]"),
    "a name that is a number": (events(event(name=3)), "'name' of traceEvents[5]"),
    "a time that is text": (events(event(ts="x")), "'ts' of traceEvents[5]"),
    "no time": (events(event(ts=None)), "'ts' of traceEvents[5] is not as MXNet writes it: None"),
    "a time without end": (events(event(ts=float("inf"))), "'ts' of traceEvents[5]"),
    "a place that is a list": (events(event(pid=[])), "'pid' of traceEvents[5]"),
    "a thread that is an object": (events(event(tid={})), "'tid' of traceEvents[5]"),
    "a process without a number": (events({"ph": "M", "name": "process_name", "args": {"name": "x"}}), "'pid'"),
    "a process without arguments": (events({"ph": "M", "name": "process_name", "pid": 0}), "'args'"),
    "backwards": (events(event(), event(ph="E", ts=1)), "'Convolution' ends at 1, before it begins at 50"),
    "latin": (b'{"traceEvents": ["\xff"]}', "can't decode byte 0xff"),
}


@pytest.mark.parametrize("case", TRACES)
def test_a_broken_trace_is_one_line(folder, capsys, case):
    content, message = TRACES[case]
    (folder / "trace.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_one_line(capsys, message, "profile", "trace.json")


def test_a_phase_of_another_type_is_another_event(folder):
    (folder / "trace.json").write_text(events(event(ph=3), event(cat=[]), event(name="\ud800"), event(ph="b")))
    assert profile("trace.json").operators[0].name == "Convolution"


def test_a_name_that_is_no_unicode_is_printed(folder, capsys):
    (folder / "trace.json").write_text(events(event(name="\ud800"), event(name="\ud800", ph="E", ts=60)))
    assert main(["profile", "trace.json"]) == 0
    assert "?" in capsys.readouterr().out


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


@pytest.mark.parametrize("kernels", [[("$x^{$", 0)], [("$x^{$", 5), ("a" * 999, 7)]], ids=["no time", "names"])
def test_names_that_look_like_formulas_and_times_of_zero_are_printed_and_drawn(folder, capsys, kernels):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'mxmp[plots]'")
    low = "volta_hgemm_128x64_nn "  # is listed for itself
    rows = [ROWS[0][:4], ROWS[1][:4], *([str(i), low + name, "0", str(ns)] for i, (name, ns) in enumerate(kernels))]
    (folder / "report.csv").write_bytes(table_of(rows))
    assert main(["profile", "report.csv", "--save", "profile.json"]) == 0
    assert "$x^{$" in capsys.readouterr().out
    assert main(["plot", "profile.json", "picture.png"]) == 0


def rows_with(row, column, value):
    rows = [list(each) for each in ROWS]
    rows[row][column] = value
    return table_of(rows)


CSV = {
    "a field that is too long": (rows_with(2, 1, "a" * 131_073), "field larger than field limit (131072)"),
    "a NUL byte": (rows_with(2, 1, "a\0b"), "line contains NUL"),
    "an endless time": (rows_with(2, 3, "inf"), "must be a number, got 'inf'"),
    "a negative time": (rows_with(2, 3, "-4"), "must be a number, got '-4'"),
    "no value": (table_of([["ID", "Kernel Name", "Metric Name"], ["1", "a", "b"]]), "has no duration of 'a'"),
    "UTF-16": (table_of(ROWS).decode().encode("utf-16"), "is of no format that can be read"),
    "empty": (b"", "is of no format that can be read"),
}


@pytest.mark.parametrize("case", CSV)
def test_a_broken_table_is_one_line(folder, capsys, case):
    content, message = CSV[case]
    (folder / "report.csv").write_bytes(content)
    assert_one_line(capsys, message, "profile", "report.csv")


def test_what_a_program_printed_before_the_table_is_of_any_length(folder):
    (folder / "report.csv").write_bytes(b'"' + b"." * 200_000 + b"\n" + table_of(ROWS))
    assert len(profile("report.csv").kernels) == 2


def change_of(saved, kind, path, value):
    raw = json.loads(json.dumps(saved[kind]))
    *path, last = path
    inner = raw
    for key in path:
        inner = inner[key]
    inner[last] = value
    return raw


REPORTS = {
    "text for a number": (("profile", ["kernels", 0, "seconds"], "x"), "kernels[0].seconds must be of type float"),
    "a number for a name": (("profile", ["kernels", 0, "name"], 3), "kernels[0].name must be of type str, got 3"),
    "an unknown kind": (("profile", ["kernels", 0, "kind"], "new"), "kind must be one of 'tensor', 'matrix'"),
    "no kernels": (("profile", ["kernels"], None), "kernels must be of type list, got None"),
    "NaN": (("profile", ["kernels", 0, "seconds"], float("nan")), "at least 0, got nan"),
    "an unknown field": (("profile", ["more"], 3), "the report must have the fields source, path, kernels"),
    "an unknown GPU": (("advice", ["device"], "p100"), "device must be one of 'v100', 't4', 'a100', got 'p100'"),
    "an unknown dtype": (("advice", ["matrices", 0, "dtype"], "float8"), "dtype must be one of float16, int8"),
    "no elements": (("advice", ["matrices", 0, "elements"], 0), "times, elements and sizes must be positive"),
    "half a product": (("advice", ["matrices", 0, "gemms"], [[1, 2]]), "missing 2 required positional arguments"),
    "no size": (("advice", ["matrices", 0, "sizes"], [["rows", 0, 0]]), "sizes must be positive"),
    "no such format": (("advice", ["format"], []), "it has no such 'format'"),
}


@pytest.mark.parametrize("case", REPORTS)
def test_a_broken_report_is_one_line(folder, capsys, saved, case):
    change, message = REPORTS[case]
    (folder / "report.json").write_text(json.dumps(change_of(saved, *change)))
    assert_one_line(capsys, message, "plot", "report.json", "picture.png")


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
    "plot": ["plot", "@", "picture.png"],
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
    assert error.startswith(f"mxmp {arguments[0]}: ")
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert out == ""
