"""The long recipes go on where they ended, and a picture of the large segmentation is a mosaic."""

import importlib
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
SMALL = {
    "segmentation_large": {"PICTURES": 2, "TILES": 2, "STEPS_OF_AN_EPOCH": 2},
    "language_large": {"ROWS": 2, "LENGTH": 8, "UNITS": 16, "VOCABULARY": 100, "STEPS_OF_AN_EPOCH": 2},
}


@pytest.fixture
def large(monkeypatch):
    """Return a function that imports a long recipe with small sizes."""
    monkeypatch.syspath_prepend(str(RECIPES))

    def imported(name):
        recipe = importlib.import_module(name)
        for constant, value in SMALL[name].items():
            monkeypatch.setattr(recipe, constant, value)
        if name == "language_large":
            pages = [["a", "word", str(page % 7), "."] * 10 for page in range(20)]
            monkeypatch.setattr(recipe, "handbook", lambda: pages)
        return recipe

    return imported


def test_a_mosaic_has_its_parts_in_their_places(large):
    parts = np.arange(2 * 2 * 3 * 3 * 4 * 5).reshape(2, 2, 3, 3, 4, 5)  # 2 pictures of 2 rows of 3 parts
    made = large("segmentation_large").mosaic(parts)
    assert made.shape == (2, 3, 8, 15)
    np.testing.assert_array_equal(made[1, :, 4:, 5:10], parts[1, 1, 1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_a_run_that_ended_goes_on_bit_for_bit(name, large, dtype, tmp_path, monkeypatch):
    recipe = large(name)
    whole = recipe.main(["--dtype", dtype, "--epochs", "2"])
    saved = recipe.Run.save

    def save_and_end(*args):
        saved(*args)
        raise KeyboardInterrupt

    arguments = ["--dtype", dtype, "--epochs", "2", "--state", str(tmp_path / "state")]
    monkeypatch.setattr(recipe.Run, "save", save_and_end)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(arguments)
    (tmp_path / "state" / "new").mkdir()  # what a run that was killed while it saved leaves
    monkeypatch.setattr(recipe.Run, "save", saved)
    resumed = recipe.main(arguments)
    assert resumed["curve"] == whole["curve"]
    assert resumed["value"] == whole["value"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-000004"]


def test_words_are_predicted_from_those_before_alone(large):
    recipe = large("language_large")
    net = recipe.LanguageModel(50)
    net.initialize(recipe.mx.init.Normal(1))
    ids = np.random.RandomState(0).randint(50, size=(2, recipe.LENGTH))
    first, second = (net(recipe.mx.nd.array(each)).asnumpy() for each in (ids, np.where(np.arange(8) < 5, ids, 7)))
    np.testing.assert_array_equal(first[:, :5], second[:, :5])
    assert not np.allclose(first[:, 5:], second[:, 5:])
