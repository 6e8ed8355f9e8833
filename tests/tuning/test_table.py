"""Times by signature, the file that keeps them, and costs; a file that cannot be read or written is one warning."""

from __future__ import annotations

import json
import math
import os
import sys

import mxnet as mx
import pytest
from kit.measuring import FEW, named, two
from kit.oracle import S

import mxmp
from mxmp.precision.graph import Graph
from mxmp.tuning import search
from mxmp.tuning.choices import Task, shapes_of
from mxmp.tuning.clock import Cast
from mxmp.tuning.table import Table

NESTED = "[" * 100_000 + "]" * 100_000


pytestmark = pytest.mark.usefixtures("in_this_process")


def tuned(folder, **options):
    return mxmp.tune(named(), data=(2, 6), cache=folder, progress=False, **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Name and text of a file of times."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(search, name, value)
        tuned(folder)
    (file,) = folder.iterdir()
    return file.name, file.read_text(encoding="utf-8")


def with_seconds(text, change):
    """The same file with other seconds; ``change`` is given all of the operators, without the casts."""
    kept = json.loads(text)
    operators = [key for key in kept["seconds"] if " -> " not in key]
    change(kept["seconds"], operators)
    return json.dumps(kept).encode()


def operators(file):
    """What was kept of operators: which casts are measured as well depends on the times."""
    kept = json.loads(file.read_text(encoding="utf-8"))["seconds"]
    return {key: value for key, value in kept.items() if " -> " not in key}


def own(caught):
    """Without what tune's imports warn of."""
    return [each for each in caught if str(each.message).startswith("tune ")]


BAD = {
    "nothing": lambda text: b"",
    "null": lambda text: b"null",
    "a list": lambda text: b"[1, 2]",
    "a string": lambda text: b'"seconds"',
    "a number": lambda text: b"1",
    "no seconds": lambda text: b"{}",
    "seconds of null": lambda text: b'{"seconds": null}',
    "seconds of a list": lambda text: b'{"seconds": [1]}',
    "seconds of a string": lambda text: b'{"seconds": "fast"}',
    "a deep list": lambda text: NESTED.encode(),
    "deep seconds": lambda text: f'{{"seconds": {{"a": {NESTED}}}}}'.encode(),
    "a text in it": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: "1.0"})),
    "null in it": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: None})),
    "true in it": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: True})),
    "a list in it": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: [1.0]})),
    "nan": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: float("nan")})),
    "infinity": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: float("inf")})),
    "1e400": lambda text: text.replace('"seconds": {', '"seconds": {"a": 1e400,').encode(),
    "10**400": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: 10**400})),
    "a year": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: 3e7})),
    "negative": lambda text: with_seconds(text, lambda s, ops: s.update({ops[0]: -1.0})),
    "zeros": lambda text: with_seconds(text, lambda s, ops: s.update(dict.fromkeys(ops, 0.0))),
    "all zeros": lambda text: with_seconds(text, lambda s, ops: s.update(dict.fromkeys(list(s), 0))),
    "UTF-16": lambda text: text.encode("utf-16"),
    "Latin-1": lambda text: text.replace("seconds", "sécondes").encode("latin-1"),
    "zero bytes": lambda text: b"\0" * 100,
    "half of it": lambda text: text[: len(text) // 2].encode(),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_of_something_else_is_one_warning_and_is_written_anew(case, good, tmp_path):
    name, text = good
    (tmp_path / name).write_bytes(BAD[case](text))
    with pytest.warns(UserWarning, match="tune measures anew") as caught:
        plan = tuned(tmp_path)
    (warning,) = own(caught)
    assert name in str(warning.message)
    assert warning.filename == __file__
    assert plan.tuned.steps
    assert all(map(math.isfinite, plan.tuned.predicted.values()))
    assert set(operators(tmp_path / name)) == {key for key in json.loads(text)["seconds"] if " -> " not in key}
    tuned(tmp_path)  # without a warning


def test_a_good_file_is_used_without_a_warning(good, tmp_path):
    name, text = good
    (tmp_path / name).write_text(text, encoding="utf-8")
    before = operators(tmp_path / name)
    tuned(tmp_path)
    assert operators(tmp_path / name) == before


def test_zeros_for_this_network_among_times_of_others_are_no_error(good, tmp_path):
    name, text = good

    def change(seconds, operators):
        seconds.update(dict.fromkeys(list(seconds), 0.0))
        seconds["training another float32"] = 1.0

    (tmp_path / name).write_bytes(with_seconds(text, change))
    assert tuned(tmp_path).tuned.steps


def chain() -> tuple[Task, dict]:
    """Three matrix operators of different sizes with relus between them, and a softmax."""
    x = S.var("data")
    for number in range(3):
        x = S.relu(S.FullyConnected(x, num_hidden=4 + number, name=f"fc{number}"), name=f"relu{number}")
    graph = Graph.from_symbol(S.softmax(x, name="softmax"))
    return Task(graph, mxmp.Policy("bfloat16"), "cpu"), shapes_of(graph, {"data": (2, 3)})


def profile_of(task: Task, low: frozenset, costs: dict) -> dict:
    """A made-up machine, on which a relu in FP32 beside a cast takes 5 more."""
    casts = [Cast(*cast) for cast in task.choice.casts(low)]
    beside = {cast.entry.node for cast in casts if cast.to_fp32}
    found = {cast: 1.0 + cast.to_fp32 for cast in casts}
    for node, name in task.names.items():
        if not node.is_variable:
            found[node] = costs[name][node in low]
            if node.op == "relu" and node not in low and any(e.node in beside for e in node.inputs):
                found[node] += 5
    return found


COSTS = {
    "fc0": (9, 1),
    "fc1": (9, 30),
    "fc2": (40, 1),
    "relu0": (2, 1),
    "relu1": (2, 1),
    "relu2": (2, 3),
    "softmax": (4, 4),
}


def test_predictions_of_profiled_plans_are_what_was_measured():
    task, shapes = chain()
    table = Table(task, shapes, True, {})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        assert not table.knows(low)
        table.learn(low, profile_of(task, low, COSTS))
        assert table.knows(low)
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        assert table.predict(low) == pytest.approx(sum(profile_of(task, low, COSTS).values()))


def test_the_cut_of_a_table_avoids_what_is_slow_low_and_layouts_that_cost():
    task, shapes = chain()
    table = Table(task, shapes, True, {})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        table.learn(low, profile_of(task, low, COSTS))
    best = search.cheapest(task.choice, table.costs())
    assert {task.names[node] for node in best} & {"fc0", "fc1", "fc2"} == {"fc0", "fc2"}
    profiled = (frozenset(), task.may_be_low, task.matrix_operators)
    assert table.predict(best) <= min(map(table.predict, profiled))


def test_times_of_earlier_runs_are_used(tmp_path):
    first = mxmp.tune(two(), data=(2, 6), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert kept["machine"]["mxnet"] == mx.__version__
    slow = {key: 1e3 if key.endswith("bfloat16") else value for key, value in kept["seconds"].items()}
    file.write_text(json.dumps({**kept, "seconds": slow}))
    plan = mxmp.tune(two(), data=(2, 6), cache=tmp_path)
    assert plan.tuned.cast_bytes["least time"] == 0
    assert set(plan.decisions) == set(first.decisions)


def a_folder_for_the_file(folder, name):
    (folder / name).mkdir()
    return folder


def a_file_for_the_folder(folder, name):
    (folder / "taken").write_text("mine")
    return folder / "taken"


def a_file_above_the_folder(folder, name):
    (folder / "taken").write_text("mine")
    return folder / "taken" / "cache"


def a_link_to_nowhere(folder, name):
    (folder / name).symlink_to(folder / "none" / "none")
    return folder


def where_nobody_may_write(folder, name):
    return "/proc/self"


UNWRITABLE = [a_folder_for_the_file, a_file_for_the_folder, a_file_above_the_folder, a_link_to_nowhere]


if sys.platform == "linux":
    UNWRITABLE.append(where_nobody_may_write)


@pytest.mark.parametrize("arrange", UNWRITABLE)
def test_a_place_that_cannot_be_written_is_one_warning_before_anything_is_measured(
    arrange, good, tmp_path, monkeypatch
):
    folder = arrange(tmp_path, good[0])
    before = sorted(os.listdir(tmp_path))
    run, warned_before = search.PlanSearch.run, []

    def noting(self):
        warned_before.extend(own(caught))
        return run(self)

    monkeypatch.setattr(search.PlanSearch, "run", noting)
    with pytest.warns(UserWarning, match="tune") as caught:
        assert tuned(folder).tuned.steps
    assert len(own(caught)) == 1
    assert own(caught) == warned_before
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_read_and_not_written(good, tmp_path):
    name, text = good
    (tmp_path / name).write_text(text, encoding="utf-8")
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="will not keep its times"):
        tuned(tmp_path)


def test_a_disk_that_fills_up_meanwhile_loses_no_plan(tmp_path, monkeypatch):
    run = search.PlanSearch.run

    def then_the_folder_goes(self):
        found = run(self)
        tmp_path.rename(tmp_path.with_name("moved"))
        return found

    monkeypatch.setattr(search.PlanSearch, "run", then_the_folder_goes)
    with pytest.warns(UserWarning, match="could not keep its times.*No such file"):
        assert tuned(tmp_path).tuned.steps
