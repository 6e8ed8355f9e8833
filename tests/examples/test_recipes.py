"""Every recipe that is there runs, shortened, and its float16 computes what float32 does, in float16."""

import importlib
import json
import math
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from support.families import FAMILIES

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
LONGEST = 150
THERE = {name: row for name, row in FAMILIES.items() if (RECIPES / row.recipe.split()[0]).exists()}


@pytest.fixture
def quick(monkeypatch):
    """Runs two steps of a family; more options may follow."""
    monkeypatch.syspath_prepend(str(RECIPES))

    def call(family, *more):
        script, *arguments = FAMILIES[family].recipe.split()
        missing = importlib.import_module("data").DataMissingError  # a package could not be fetched
        try:
            return importlib.import_module(script[: -len(".py")]).main([*arguments, "--quick", *more])
        except missing as error:
            pytest.skip(str(error))

    return call


@pytest.mark.filterwarnings(
    "ignore:Parameter normalized.* not used by any computation"
)  # GluonCV's R-CNN, at inference
@pytest.mark.parametrize("family", THERE)
def test_a_recipe_starts_in_float16_where_float32_does(family, quick, tmp_path):
    out = tmp_path / "result.json"
    full, low = quick(family, "--dtype", "float32"), quick(family, "--dtype", "float16", "--out", str(out))
    assert json.loads(out.read_text()) == low
    assert low["family"] == family
    assert low["dtype"] == "float16"
    assert low["steps"] == full["steps"] > 0
    assert all(math.isfinite(loss) for _, loss in low["curve"] + full["curve"])
    assert low["curve"][0][1] == pytest.approx(full["curve"][0][1], rel=0.02)
    if figures(low) == figures(full):  # one loss may round to the same number; two, where nothing computes in float16
        low, full = (quick(family, "--dtype", dtype, "--seed", "1") for dtype in ("float16", "float32"))
    assert figures(low) != figures(full)


def figures(result):
    return {key: value for key, value in result.items() if key not in ("dtype", "seconds", "skipped")}


BESIDE = {"weight_dropout": "Parameter.data is overridden", "forecast": "Python values, and restore"}  # no families


@pytest.mark.parametrize("recipe", BESIDE)
def test_a_recipe_beside_the_families_trains_in_all_dtypes(recipe, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    results = {}
    for dtype in ("float32", "float16", "bfloat16"):
        scale = ["--loss-scale", "128"] if dtype == "float16" else []  # two steps, and none skipped
        results[dtype] = importlib.import_module(recipe).main(["--quick", "--dtype", dtype, *scale])
    full = results.pop("float32")
    for dtype, low in results.items():
        assert low["steps"] == full["steps"] > 0
        assert low["skipped"] == 0
        for (_, found), (_, want) in zip(low["curve"], full["curve"]):
            assert found == pytest.approx(want, rel=0.02), dtype
        assert low["value"] == pytest.approx(full["value"], rel=0.05)
        assert figures(low) != figures(full)


def test_bfloat16(quick):
    full, low = (quick("segmentation", "--dtype", dtype) for dtype in ("float32", "bfloat16"))
    assert low["curve"][0][1] == pytest.approx(full["curve"][0][1], rel=0.02)
    assert low["curve"] != full["curve"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arcface_learns_in_two_epochs(dtype, monkeypatch):
    """A weight that is normalized before its layer, and the arccos of a cosine."""
    monkeypatch.syspath_prepend(str(RECIPES))
    result = importlib.import_module("arcface").main(["--dtype", dtype, "--epochs", "2"])
    assert result["value"] > 80
    assert all(math.isfinite(loss) for _, loss in result["curve"])
    assert (result["skipped"] < 15) if dtype == "float16" else not result["skipped"]


def test_a_seed_gives_the_same_run_again_and_another_does_not(quick):
    first, again, other = (quick("segmentation", "--seed", seed) for seed in "112")
    assert first["curve"] == again["curve"] != other["curve"]


def test_without_masters_a_small_update_is_lost(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    common = importlib.import_module("common")
    weights = {}
    for more in ([], ["--no-masters"]):
        options = common.parser("A test.", epochs=1).parse_args(["--dtype", "float16", "--loss-scale", "1024", *more])
        run = common.Run(options, "test", "nothing", 0)
        net = mx.gluon.nn.Dense(1, in_units=4, use_bias=False)
        net.initialize(mx.init.One())
        net = run.convert(net)
        trainer = run.trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-13})
        for _ in range(4):
            with mx.autograd.record():
                loss = net(mx.nd.ones((1, 4))).sum()
            trainer.backward(loss)
            trainer.step(1)
        weights[bool(more)] = net.weight.data().asnumpy()
    assert np.all(weights[False] == 1 - 4 * 2.0**-13)
    assert np.all(weights[True] == 1)  # a float16 below 1 is 2^-11 away; each update is a quarter of that


@pytest.mark.parametrize(
    "arguments", [["--epochs", "0"], ["--loss-scale", "nonsense"], ["--loss-scale", "-1"], ["--dtype", "float8"]]
)
def test_options_that_mean_nothing_are_named(quick, arguments, capsys):
    with pytest.raises(SystemExit):
        quick("segmentation", *arguments)
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--no-masters"], ["--loss-scale", "8"]])
def test_float32_takes_no_options_of_mixed_precision(quick, more):
    with pytest.raises(ValueError, match="float32 has neither"):
        quick("segmentation", "--dtype", "float32", *more)


def test_a_module_cannot_do_without_masters(quick):
    with pytest.raises(ValueError, match="--no-masters"):
        quick("ssd_symbolic", "--no-masters")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.name)
def test_recipes_are_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST or path.name == "common.py"
    assert "CC BY" in "".join(lines[:20]) or path.name == "common.py" or "icen" in "".join(lines[:30])
