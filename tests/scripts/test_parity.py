"""The verdict's arithmetic, and that runs go on where they ended."""

import json
import math

import pytest
from parity import run as parity
from parity.run import verdict


def by_seed(*values):
    return dict(enumerate(values))


def test_means_within_the_tolerance_are_equivalent():
    found = verdict(by_seed(90, 91, 92), by_seed(90.2, 91.2, 92.2), 0.2)
    assert found.holds
    assert found.difference == pytest.approx(0.2)
    assert found.standard_error == pytest.approx(0)
    assert not verdict(by_seed(90, 91, 92), by_seed(90.21, 91.21, 92.21), 0.2).holds


def test_means_within_two_standard_errors_are_equivalent():
    base = by_seed(90, 90, 90, 90)
    found = verdict(base, by_seed(89, 92, 90, 92), 0.2)
    # differences -1, 2, 0, 2: mean 0.75, standard deviation 1.5
    assert found.difference == pytest.approx(0.75)
    assert found.standard_error == pytest.approx(0.75)
    assert found.bound == pytest.approx(1.5)
    assert found.holds
    assert not verdict(base, by_seed(91, 92, 91, 92), 0.2).holds


def test_differences_are_paired_by_seed():
    base, low = by_seed(10, 50, 90), {2: 90.5, 0: 10.5, 1: 50.5}
    assert not verdict(base, low, 0.2).holds  # the spread over seeds is no excuse
    assert verdict(base, {**low, 7: -100.0}, 0.2) == verdict(base, low, 0.2)


def test_too_few_seeds_are_no_verdict():
    assert verdict(by_seed(1, 2), by_seed(1, 2), 0.2) is None


def test_what_is_not_finite_is_not_equivalent():
    assert not verdict(by_seed(1, 2, 3), by_seed(1, 2, math.nan), 0.2).holds
    assert not verdict(by_seed(1, 2, 3), by_seed(1, 2, math.inf), 0.2).holds


@pytest.fixture
def runs(monkeypatch):
    """Jobs that were run, instead of running them."""
    done = []

    def ended(command, **_):
        done.append(command[3:-2])
        result = {"seed": int(command[command.index("--seed") + 1]), "value": 90.0}
        with open(command[-1], "w") as out:
            json.dump(result, out)
        return type("Ended", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(parity.subprocess, "run", ended)
    return done


def test_a_second_call_runs_what_the_first_has_not(runs, tmp_path):
    there = ["--results", str(tmp_path)]
    assert parity.main(["ssd", "--dtypes", "float32", "--seeds", "0", "1", *there]) == 0
    assert parity.main(["ssd", "--seeds", "0", "1", "2", *there]) == 0
    assert parity.judged("ssd", parity.load(tmp_path, "ssd"), "float16") is None  # the row asks for five
    assert parity.main(["ssd", *there]) == 0
    assert runs[0] == ["examples/recipes/ssd.py", "--dtype", "float32", "--seed", "0"]
    assert len(runs) == len({tuple(run) for run in runs})
    assert parity.values(parity.load(tmp_path, "ssd"), "bfloat16") == dict.fromkeys(range(5), 90)
    assert parity.judged("ssd", parity.load(tmp_path, "ssd"), "float16").holds


def test_a_miss_gets_twice_the_seeds_once():
    def results(count, difference):
        pairs = [("float32", 0), ("float16", difference), ("bfloat16", 0)]
        return {f"{d} {s}": {"seed": s, "value": 90 + s + more} for d, more in pairs for s in range(count)}

    assert parity.FAMILIES["ssd"].seeds == 5
    assert parity.seeds_of("ssd", results(5, 0.1)) == 5
    assert parity.seeds_of("ssd", results(4, 1)) == 5  # not all of the first are there
    assert parity.seeds_of("ssd", results(5, 1)) == 10
    assert parity.seeds_of("ssd", results(10, 1)) == 10


def test_a_family_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        parity.main(["resnet51"])
    assert "resnet51" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_leaves_no_result(monkeypatch, tmp_path, capsys):
    job = parity.Job("ssd", "float16", 0, "--loss-scale nonsense")
    assert "nonsense" in parity.run(job)[1]
    monkeypatch.setattr(parity, "jobs_of", lambda *_: [job])
    assert parity.main(["ssd", "--results", str(tmp_path)]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert parity.load(tmp_path, "ssd") == {}


def test_a_run_that_diverges_without_a_safeguard_is_a_result(monkeypatch, tmp_path):
    ended = type("Ended", (), {"returncode": 1, "stderr": "Traceback\nFloatingPointError: 3 steps in a row"})
    monkeypatch.setattr(parity.subprocess, "run", lambda *_, **__: ended)
    assert "3 steps" in parity.run(parity.Job("ssd", "float16", 0))[1]
    found = {f"float32 {seed}": {"seed": seed, "value": 90} for seed in range(3)}
    for seed in range(3):
        job, result = parity.run(parity.Job("ssd", "float16", seed, "--no-masters"))
        found[job.key] = result
    assert parity.values(found, "float16") == {}
    assert not parity.judged("ssd", found, "float16", "--no-masters").holds


def test_the_list_has_every_family_of_the_table(capsys):
    assert parity.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(parity.FAMILIES)
    assert len(listed) >= 26


def test_the_page_shows_who_fails_and_what_is_missing(monkeypatch, tmp_path):
    from pages import parity as make_parity_page

    means = {"float32": 60, "float16": 60.1, "bfloat16": 50}
    of_all = {"metric": "mAP, %", "chance": 0, "steps": 9, "curve": [[1, 2.0], [9, 0.5]]}
    results = {
        f"{dtype} {seed}": {**of_all, "seed": seed, "value": value + seed}
        for dtype, value in means.items()
        for seed in range(5)
    }
    parity.save(tmp_path / "parity", "ssd", results)
    monkeypatch.setattr(make_parity_page, "RESULTS", tmp_path / "parity")
    monkeypatch.setattr(make_parity_page, "DOCS", tmp_path)
    make_parity_page.main()
    page = (tmp_path / "parity.md").read_text()
    assert "1 of 2 pairs" in page
    assert f"{2 * len(parity.FAMILIES) - 2} of {2 * len(parity.FAMILIES)} pairs do not have" in page
    row = next(line for line in page.splitlines() if line.startswith("| ssd | mAP"))
    assert "| 62.00 ± 1.58 (5) | 62.10 ± 1.58 (5) |" in row
    assert "| +0.10 ± 0.00, allowed 0.20 | **-10.00 ± 0.00, allowed 0.20** |" in row
    assert "`python examples/recipes/ssd.py --dtype float16 --seed 0` | 9 |" in page
    assert {path.name for path in tmp_path.glob("*.png")} == {"parity-curves.png", "parity-values.png"}
