"""The verdict's arithmetic, the mean over families, and that runs go on where they ended."""

import json
import math

import numpy as np
import pytest
from parity import run as parity
from parity.verdict import METRICS, Metric, Verdict, plain_mean, pooled, verdict
from scipy.stats import ttest_rel

POINTS = Metric(1, higher=True)


def by_seed(*values):
    return dict(enumerate(values))


def test_noise_never_widens_the_margin():
    """0.6 against 16 letter errors with a spread of 20 passed the first rule: within two standard errors."""
    base = by_seed(0.26, 0.52, 1.82, 0.0, 0.59)
    low = by_seed(0.39, 3.39, 0.39, 37.5, 40.3)
    found = verdict(base, low, METRICS["letter error rate, %"])
    assert found.difference == pytest.approx(15.8, abs=0.1)
    assert found.spread == pytest.approx(14.6, abs=0.1)
    assert found.kind == "undecided"
    assert found.seeds_needed > 1000


def test_a_difference_within_the_margin_is_equivalent_only_if_its_interval_is():
    base = by_seed(90, 91, 92)
    assert verdict(base, by_seed(90.9, 91.9, 92.9), POINTS).kind == "equivalent"
    assert verdict(base, by_seed(91, 92, 93), POINTS).kind == "equivalent"
    assert verdict(base, by_seed(91.2, 92.2, 93.2), POINTS).kind == "different"
    assert verdict(base, by_seed(89.5, 91, 92.5), POINTS).kind == "equivalent"  # 0 +- 2.92 * 0.5 / sqrt(3) = 0.84
    assert verdict(base, by_seed(89.2, 91, 92.8), POINTS).kind == "undecided"  # 0 +- 1.35
    assert verdict(base, by_seed(90.6, 92.1, 92.3), POINTS).kind == "undecided"  # 0.67 +- 0.66


@pytest.mark.parametrize("seed", range(5))
def test_the_verdict_is_that_of_two_one_sided_tests(seed):
    random = np.random.RandomState(seed)
    base, low = random.normal(90, 2, 12), random.normal(90, 0.8, 12) * 0.6 + 36
    found = verdict(by_seed(*base), by_seed(*low), POINTS)
    above = ttest_rel(low + 1, base, alternative="greater").pvalue
    below = ttest_rel(low - 1, base, alternative="less").pvalue
    assert (found.kind == "equivalent") == (max(above, below) <= 0.05)
    assert found.interval(0.95) == pytest.approx(tuple(ttest_rel(low, base).confidence_interval(0.95)))
    smallest = found._replace(margin=found.holds_from)
    assert smallest.kind == "equivalent"
    assert smallest._replace(margin=0.999 * found.holds_from).kind != "equivalent"


def test_worse_and_better_go_by_the_metric():
    base, above = by_seed(10, 11, 12), by_seed(15, 16.1, 17)
    for metric, worse in (("letter error rate, %", True), ("top-1, %", False)):
        found = verdict(base, above, METRICS[metric])
        assert found.kind == "different"
        assert found.worse == worse


def test_a_relative_margin_is_a_share_of_the_mean_of_float32():
    found = verdict(by_seed(90, 100, 110), by_seed(90.5, 100.5, 110.5), METRICS["perplexity"])
    assert found.margin == pytest.approx(1)
    assert found.kind == "equivalent"


def test_differences_are_paired_by_seed():
    base, low = by_seed(10, 50, 90), {2: 93.0, 0: 13.0, 1: 53.1}
    assert verdict(base, low, POINTS).kind == "different"  # the spread over seeds is no excuse
    assert verdict(base, {**low, 7: -100.0}, POINTS) == verdict(base, low, POINTS)


def test_too_few_seeds_are_no_verdict():
    assert verdict(by_seed(1, 2), by_seed(1, 2), POINTS) is None


def test_what_is_not_finite_has_diverged():
    for value in (math.nan, math.inf):
        found = verdict(by_seed(1, 2, 3), by_seed(1, 2, value), POINTS)
        assert found.kind == "diverged"
        assert found.worse


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0])
def test_so_many_seeds_show_equivalence_in_eighty_of_a_hundred_cases(deviation):
    needed = Verdict(0.3, deviation / math.sqrt(5), 1, 1, 1, 5).seeds_needed
    random = np.random.RandomState(0)

    def power(seeds):
        drawn = random.normal(0, deviation, (4000, seeds))
        found = [Verdict(d.mean(), d.std(ddof=1) / math.sqrt(seeds), 1, 1, 1, seeds).kind for d in drawn]
        return found.count("equivalent") / len(found)

    assert power(needed) > 0.75  # the formula is a little cautious or bold where there are few seeds
    assert power(max(needed // 2, 3)) < 0.75


def of_effects(effects, errors):
    return [Verdict(effect, error, 1.0, 1.0, 1, 5) for effect, error in zip(effects, errors)]


def test_the_mean_of_families_is_that_of_dersimonian_and_laird():
    """Compare with statsmodels 0.14, "random effect wls" of combine_effects(..., method_re="chi2", use_t=True)."""
    found = pooled(of_effects([0.1, -0.4, 0.3, 0.9, -0.1], [0.2, 0.3, 0.1, 0.25, 0.4]))
    assert found[:3] == pytest.approx((0.20569652782, -0.37050639710, 0.78189945274), rel=1e-9)


def test_a_mean_goes_by_what_is_better_and_by_the_spread_of_a_seed():
    first, second, third = of_effects([1, 1, 2], [0.1, 0.1, 0.1])
    found = plain_mean([first, second._replace(gain=-1, difference=-1), third._replace(spread=2)])
    assert found == (1, 1, 1, 3)


@pytest.fixture
def runs(monkeypatch):
    """Jobs that were run, instead of running them."""
    done = []

    def ended(command, **_):
        done.append(command[3:-2])
        result = {"seed": int(command[command.index("--seed") + 1]), "value": 90.0, "metric": "mAP, %"}
        with open(command[-1], "w") as out:
            json.dump(result, out)
        return type("Ended", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(parity.subprocess, "run", ended)
    return done


def test_a_second_call_runs_what_the_first_has_not(runs, tmp_path):
    there = ["--results", str(tmp_path)]
    assert parity.main(["ssd", "--dtypes", "float32", "--seeds", "0", "1", *there]) == 0
    assert parity.main(["ssd", "--seeds", "0", "1", "2", *there]) == 0
    assert parity.main(["ssd", *there]) == 0
    assert runs[0] == ["examples/recipes/ssd.py", "--dtype", "float32", "--seed", "0"]
    assert len(runs) == len({tuple(run) for run in runs})
    results = parity.load(tmp_path, "ssd")
    assert parity.values(results, "bfloat16") == dict.fromkeys(range(parity.FAMILIES["ssd"].seeds), 90)
    assert parity.judged(results, "float16").kind == "equivalent"


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
    found = {f"float32 {seed}": {"seed": seed, "value": 90, "metric": "mAP, %"} for seed in range(3)}
    for seed in range(3):
        job, result = parity.run(parity.Job("ssd", "float16", seed, "--no-masters"))
        found[job.key] = result
    assert parity.values(found, "float16") == {}
    assert parity.judged(found, "float16", "--no-masters").kind == "diverged"


def test_every_result_has_a_metric_with_a_margin():
    for family in parity.FAMILIES:
        results = parity.load(parity.RESULTS, family).values()
        assert {result["metric"] for result in results if "metric" in result} <= METRICS.keys(), family


def test_the_list_has_every_family_of_the_table(capsys):
    assert parity.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(parity.FAMILIES)
    assert len(listed) >= 26


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_every_seed_of_fp32_learns(family):
    runs = parity.load(parity.RESULTS, family)
    chance = runs["float32 0"]["chance"]
    gains = np.abs(np.array(list(parity.values(runs, "float32").values())) - chance)
    assert len(gains) >= 12
    assert gains.min() > 2 / 3 * gains.mean()
    assert gains.min() > gains.mean() - 3 * gains.std(ddof=1)


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
    large = {
        **of_all,
        "family": "segmentation_large",
        "dtype": "float16",
        "loss_scale": "none",
        "skipped": 0,
        "value": 7.5,
    }
    (tmp_path / "parity" / "large").mkdir()
    (tmp_path / "parity" / "large" / "float16.json").write_text(json.dumps(large))
    monkeypatch.setattr(make_parity_page, "RESULTS", tmp_path / "parity")
    monkeypatch.setattr(make_parity_page, "DOCS", tmp_path)
    make_parity_page.main()
    page = (tmp_path / "parity.md").read_text()
    pairs = 2 * len(parity.FAMILIES)
    assert f"Of {pairs} pairs of a family and a dtype, **1 are equivalent** to float32,\n1 are shown" in page
    assert f"{pairs - 2} pairs do not have" in page
    row = next(line for line in page.splitlines() if line.startswith("| ssd | mAP"))
    assert "| 62.00 ± 1.58 (5) | float16 | 62.10 ± 1.58 (5) | +0.10 (+0.10 to +0.10) | equivalent | 0.1 |" in row
    assert "| bfloat16 | 52.00 ± 1.58 (5) | -10.00 (-10.00 to -10.00) | **different, worse** |" in page
    assert "| 1e+10 |" in page  # of refinement
    assert "`python examples/recipes/ssd.py --dtype float16 --seed 0` | 9 |" in page
    pictures = {f"parity-{name}.png" for name in ("forest", "curves", "large")}
    assert "| segmentation_large | float16 | none | 9 | 0 | 0.5000 | 7.50 mAP, % |" in page
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
