"""The large segmentation goes on where it ended, and its pictures are mosaics."""

import importlib
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


@pytest.fixture
def large(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = importlib.import_module("segmentation_large")
    for name, value in {"PICTURES": 2, "TILES": 2, "STEPS_OF_AN_EPOCH": 2}.items():
        monkeypatch.setattr(recipe, name, value)
    return recipe


def test_a_mosaic_has_its_parts_in_their_places(large):
    parts = np.arange(2 * 2 * 3 * 3 * 4 * 5).reshape(2, 2, 3, 3, 4, 5)  # 2 pictures of 2 rows of 3 parts
    made = large.mosaic(parts)
    assert made.shape == (2, 3, 8, 15)
    np.testing.assert_array_equal(made[1, :, 4:, 5:10], parts[1, 1, 1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_run_that_ended_goes_on_bit_for_bit(large, dtype, tmp_path, monkeypatch):
    whole = large.main(["--dtype", dtype, "--epochs", "2"])
    saved = large.save

    def save_and_end(*args):
        saved(*args)
        raise KeyboardInterrupt

    arguments = ["--dtype", dtype, "--epochs", "2", "--state", str(tmp_path / "state")]
    monkeypatch.setattr(large, "save", save_and_end)
    with pytest.raises(KeyboardInterrupt):
        large.main(arguments)
    (tmp_path / "state" / "new").mkdir()  # what a run that was killed while it saved leaves
    monkeypatch.setattr(large, "save", saved)
    resumed = large.main(arguments)
    assert resumed["curve"] == whole["curve"]
    assert resumed["value"] == whole["value"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-000004"]
