"""The file of states: a damaged or foreign one changes nothing, none runs code, and no save loses the last one."""

from __future__ import annotations

import io
import json
import os
import pickle

import mxnet as mx
import numpy as np
import pytest
from kit.killed import killed_everywhere
from kit.nets import two_layers
from kit.pictures import tree
from kit.resuming import files, steps, trainer_of, whole
from kit.twins import MASTERS

import mxmp
from mxmp.step import state_file, states


class Explodes:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def good_file(tmp_path):
    net = two_layers(MASTERS)
    trainer = trainer_of(net)
    steps(net, trainer, range(6))
    fname = tmp_path / "good"
    trainer.save_states(str(fname))
    return net, trainer, fname.read_bytes()


@pytest.fixture
def refused(tmp_path):
    """Check that content, or a file, is refused in words and changes nothing of a trainer with the good ``content``."""
    net, trainer, content = good_file(tmp_path)
    before, bad = whole(trainer), tmp_path / "bad"

    def check(given, message="nothing was loaded"):
        if isinstance(given, bytes):
            bad.write_bytes(given)
        with pytest.raises(ValueError, match=message):
            trainer.load_states(str(bad if isinstance(given, bytes) else given))
        assert whole(trainer) == before

    check.content, check.net, check.trainer = content, net, trainer
    return check


def test_a_file_cut_anywhere_is_a_clear_error_and_changes_nothing(refused):
    for length in [*range(0, len(refused.content), 997), len(refused.content) - 1]:
        refused(refused.content[:length], r"truncated or changed.*nothing was loaded")
    steps(refused.net, refused.trainer, range(6, 8))


def test_a_changed_byte_never_loads_something_else(tmp_path):
    """A flip in the zip's own bookkeeping may go unnoticed; then what is loaded is what was saved."""
    _, trainer, content = good_file(tmp_path)
    before, count = whole(trainer), 0
    for at in range(0, len(content), 53):
        changed = bytearray(content)
        changed[at] ^= 1
        (tmp_path / "bad").write_bytes(changed)
        try:
            trainer.load_states(str(tmp_path / "bad"))
        except ValueError:
            count += 1
        assert whole(trainer) == before
    assert count > len(content) / 53 / 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a states file",
        pickle.dumps({"a": 1}),
        pickle.dumps(({}, {})),
        pickle.dumps([1, 2, 3]),
        json.dumps({"format": "mxmp-states-1"}).encode(),
        b"PK\x03\x04 but no zip",
    ],
    ids=["empty", "text", "dict", "pair", "list", "json", "zip"],
)
def test_a_file_of_something_else_is_a_clear_error(content, refused):
    refused(content, "no states file of mxmp")


def test_other_zips_and_parameter_files_are_refused(tmp_path, refused):
    np.savez(tmp_path / "bad.npz", tree=np.zeros(3))
    refused.net.save_parameters(str(tmp_path / "net.params"))
    for name in ("bad.npz", "net.params"):
        refused(tmp_path / name, "no states file")


@pytest.mark.parametrize("where", ["alone", "in the states", "in the optimizer", "in an npz"])
def test_code_in_a_file_is_not_run(where, tmp_path, refused):
    target = tmp_path / "exploded"
    bomb = Explodes(target)
    optimizer = mx.optimizer.create("adam")
    if where == "in the optimizer":
        optimizer.extra = bomb
    holder = {"alone": bomb, "in the states": ({0: bomb}, optimizer), "in the optimizer": ({}, optimizer)}
    if where == "in an npz":
        with np.load(io.BytesIO(refused.content)) as archive:
            arrays = dict(archive)
        arrays["a0"] = np.array([bomb], dtype=object)
        np.savez(tmp_path / "bad.npz", **arrays)
        refused(tmp_path / "bad.npz")
    else:
        refused(pickle.dumps(holder[where]))
    assert not target.exists()
    pickle.loads(pickle.dumps(Explodes(target)))
    assert target.exists(), "the bomb itself works"


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        *((f"builtins\n{name}", f"builtins.{name}") for name in ("eval", "exec", "getattr", "__import__")),
        *((f"mxnet.{name}", "no array or optimizer of MXNet") for name in ("ndarray\nsave", "gluon.utils\ndownload")),
        ("mxnet.optimizer.optimizer\nos", "no array or optimizer of MXNet"),
    ],
)
def test_functions_that_run_code_are_not_admitted(name, refusal, refused):
    refused(f"c{name}\n(S'1'\ntR.".encode(), refusal)


@pytest.mark.slow
def test_kill_9_during_a_save_leaves_the_old_file_or_the_new_one(tmp_path):
    fname = tmp_path / "states"

    def write(value):
        arrays = {i: np.full(50_000, value, np.float32) for i in range(8)}
        state_file.write(str(fname), states.OptimizerStates(None, "SGD", {}, None, arrays, {}, [])._asdict())

    write(0.0)
    values = []
    for where in killed_everywhere(lambda: write(7.0), tmp_path, fname.stat().st_size):
        found = states.read(str(fname)).states
        assert all((a == a[0]).all() for a in found.values()), where
        values.append({float(a[0]) for a in found.values()})
    assert values[:-1] == [{0.0}] * (len(values) - 1)
    assert values[-1] == {7.0}


def test_a_save_that_fails_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    _, trainer, content = good_file(tmp_path)

    def half(file, *_, **__):
        file.write(b"half")
        raise OSError("full")

    monkeypatch.setattr(np.lib.format, "write_array", half)
    with pytest.raises(OSError, match="full"):
        trainer.save_states(str(tmp_path / "good"))
    assert (tmp_path / "good").read_bytes() == content
    assert os.listdir(tmp_path) == ["good"]


def test_the_file_is_data_that_numpy_alone_can_read(tmp_path):
    good_file(tmp_path)
    with np.load(tmp_path / "good", allow_pickle=False) as archive:
        text = json.loads(archive["tree"].tobytes())
    assert text["format"] == "mxmp-states-1"


def test_loading_returns_fresh_arrays_that_share_nothing(tmp_path):
    net, trainer, _ = good_file(tmp_path)
    first = tree(trainer._updaters[0].states)
    trainer.load_states(str(tmp_path / "good"))
    other = trainer_of(two_layers(MASTERS))
    other.load_states(str(tmp_path / "good"))
    steps(net, trainer, range(6, 8))
    assert tree(other._updaters[0].states) == first


def test_a_learning_rate_that_is_a_numpy_number_is_in_the_file(tmp_path):
    _, fname = files(tmp_path)
    net = two_layers(None)
    trainer = mxmp.Trainer(
        net.collect_params(), "sgd", {"learning_rate": np.float32(0.25), "momentum": np.float64(0.5)}
    )
    steps(net, trainer, range(2))
    trainer.save_states(fname)
    other = two_layers(None)
    resumed = mxmp.Trainer(other.collect_params(), "sgd", {"learning_rate": 0.5})
    resumed.load_states(fname)
    assert resumed.learning_rate == 0.25
    assert resumed.optimizer.momentum == 0.5
