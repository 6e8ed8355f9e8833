"""Small sets of digits, and the example as a function."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.digits import load, write

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder with train.rec (40 digits) and val.rec (22)."""
    folder = tmp_path_factory.mktemp("digits")
    (train, train_labels), (val, val_labels) = load(16)
    write(folder, "train", (train[:40], train_labels[:40]))
    write(folder, "val", (val[:22], val_labels[:22]))
    return folder


@pytest.fixture
def arguments(digits, tmp_path):
    """Command-line arguments of a run that takes about two seconds; keywords change or add options."""

    def build(**changes):
        options = {
            "model": "cifar_resnet20_v1",
            "rec_train": digits / "train.rec",
            "rec_val": digits / "val.rec",
            "num_classes": 10,
            "input_size": 16,
            "crop_ratio": 1,
            "augment": "shift",
            "batch_size": 8,
            "num_epochs": 2,
            "save_dir": tmp_path / "params",
            "num_gpus": 0,
            "results": tmp_path / "results.json",
        }
        options.update(changes)
        words = []
        for name, value in options.items():
            if value is not False:
                words.append("--" + name.replace("_", "-"))
                words += [] if value is True else [str(value)]
        return words

    return build


@pytest.fixture
def run(arguments, capsys):
    """Runs the example: .status, .error (what it wrote last on stderr), .lines of stderr."""
    import imagenet_gluon

    def call(**changes):
        status = imagenet_gluon.main(arguments(**changes))
        lines = capsys.readouterr().err.strip().splitlines()
        return SimpleNamespace(status=status, lines=lines, error=lines[-1] if lines else "")

    return call


@pytest.fixture
def recipe(monkeypatch):
    """Imports a module of the recipes by its name."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module
