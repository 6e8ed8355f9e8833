"""``verify``: whether a port is right, and what is left only rounding, of small programs in the style of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.ports import PORTS, PROGRAMS, WRONG

import mxmp
from mxmp import Trainer, convert
from mxmp.__main__ import main
from mxmp.diagnose import plot_verification, verify
from mxmp.diagnose.verifying.judging import Course
from mxmp.diagnose.verifying.rounding import low_departure_of


def test_the_table_has_every_wrong_program():
    assert sorted(WRONG) == sorted(path.stem for path in (PROGRAMS / "wrong").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("port", [*PORTS[::4], *PORTS[3::4]], ids=lambda port: f"{port.name}-{port.dtype}")
def test_a_port_is_called_right_or_named(port):
    """Each in one of the dtypes; ``scripts/dev.py check verify`` tries both."""
    found = port.verified()
    assert port.is_answered(found), str(found)
    assert found.status == (port.expected is not None)


# -- A function ------------------------------------------------------------------------------------


def training(backward, *, steps=5, policy="float16", draw=np.random.randn):
    """A function that builds and trains, as in a notebook, by names that were imported before."""

    def run():
        net = nn.HybridSequential()
        net.add(nn.Dense(8, activation="relu"), nn.Dense(2))
        net.initialize()
        convert(net, policy)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(steps):
            x = mx.nd.array(draw(4, 3))
            with autograd.record():
                loss = gluon.loss.L2Loss()(net(x), x[:, :2])
            backward(trainer, loss)
            trainer.step(4)

    return run


def scaled(trainer, loss):
    trainer.backward(loss)


def plain(trainer, loss):
    loss.backward()


@pytest.mark.slow
def test_a_function_with_names_that_it_has_imported_before():
    found = verify(training(scaled), progress=False)
    assert found.right, str(found)
    assert found.steps == 5  # the function ends there
    assert found.dtype == "float16"
    assert found.departure is None
    assert set(found.courses) >= {"plain", "graph", "low", "noise 1", "noise 2"}
    found = verify(training(plain), 3, progress=False)
    assert found.status == 1
    assert "instead of loss.backward()" in found.verdict


@pytest.mark.slow
def test_this_process_stays_as_it_was():
    before = {name: vars(mxmp)[name] for name in mxmp.__all__}
    folder, numpy_state, path = os.getcwd(), np.random.get_state()[1].copy(), list(sys.path)
    hybridize, initialize = gluon.HybridBlock.hybridize, gluon.Parameter.set_data
    verify(training(scaled), 2, progress=False)
    assert {name: vars(mxmp)[name] for name in mxmp.__all__} == before
    assert (os.getcwd(), sys.path) == (folder, path)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert gluon.HybridBlock.hybridize is hybridize
    assert gluon.Parameter.set_data is initialize


def unseeded(*shape):
    return np.random.RandomState(list(os.urandom(16))).randn(*shape)


UNKNOWN = {
    "it fails in plain MXNet": (lambda: 1 / 0, "in plain MXNet it fails with ZeroDivisionError: division by zero"),
    "no update": (lambda: None, "makes no update by an mxmp.Trainer or mxmp.Module"),
    "it exits with an error": (lambda: sys.exit("no data"), "fails with SystemExit('no data')"),
    "it crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "fails with SIGSEGV"),
    "it is not reproducible": (
        training(scaled, draw=unseeded),
        "two plain runs with the same seeds differ from update 1",
    ),
    "plain MXNet is NaN": (
        training(scaled, draw=lambda *shape: np.full(shape, 1e30)),
        "from update 1 on, plain MXNet's own gradients are inf or NaN",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_said_has_its_reason(case):
    run, why = UNKNOWN[case]
    found = verify(run, progress=False)
    assert found.right is None, str(found)
    assert found.verdict.startswith("Cannot say: ")
    assert why in found.verdict
    assert found.status == 2


@pytest.mark.slow
def test_a_trainer_over_a_net_that_is_not_converted():
    def run():
        net = nn.Dense(1, in_units=2)
        net.initialize()
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=None)
        with autograd.record():
            loss = net(mx.nd.ones((1, 2)))
        trainer.backward(loss)
        trainer.step(1)

    assert "nothing is converted" in verify(run, progress=False).verdict


def test_wrong_arguments():
    with pytest.raises(TypeError, match="a function that builds and trains, or a script, got int"):
        verify(3)
    with pytest.raises(ValueError, match="steps must be a positive integer"):
        verify(print, 0)
    with pytest.raises(ValueError, match="arguments are for a script"):
        verify(print, arguments=["--fast"])
    with pytest.raises(FileNotFoundError):
        verify("no-such-script.py")


# -- A script --------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
import mxnet as mx, numpy as np
from mxnet import autograd, gluon
import mxmp
import helper
assert sys.argv[1:] == ["--rate", "0.1"] and __name__ == "__main__"
assert open(os.path.join("data", "x.txt")).read() == "1"
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(2))
net.initialize()
mxmp.convert(net, "bfloat16")
trainer = mxmp.Trainer(net.collect_params(), "sgd")
with open("log.txt", "w") as log, open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "new.txt"), "w"):
    for step in range(1000):
        x = mx.nd.array(np.random.randn(4, 3))
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), x[:, :2])
        trainer.backward(loss)
        trainer.step(4)
        log.write("step")
        net.save_parameters("net.params")
        trainer.save_states("net.states")
        np.save("x.npy", x.asnumpy())
"""
KEPT = ("log.txt", "net.params", "net.states", "x.npy")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("1")
    for name in KEPT:
        (tmp_path / name).write_text("precious")
    return tmp_path


@pytest.mark.slow
def test_the_command_leaves_the_files_of_the_user_as_they_are(folder, capfd):
    pytest.importorskip("matplotlib")
    before = sorted(os.listdir(folder))
    status = main(["verify", "train.py", "--steps", "3", "--plot", "p.png", "--", "--rate", "0.1"])
    out = capfd.readouterr().out
    assert status == 0, out
    assert out.startswith("The port is right. plain and graph agree bit for bit over 3 updates; bfloat16 differs by ")
    assert sorted(os.listdir(folder)) == sorted([*before, "p.png"])
    assert {(folder / name).read_text() for name in KEPT} == {"precious"}


CHANGES = """
import os, shutil
import mxnet as mx
from pathlib import Path
open("a/b/old.txt", "a").write(" and new")
Path("a/b/new.txt").write_text("new")
os.remove("a/removed.txt")
os.mkdir("empty/inner")
mx.nd.save("a/b/array.nd", mx.nd.ones(2))
os.chdir("entered")
open("here.txt", "w").write("changed")
os.chdir("..")
shutil.rmtree("tree")
os.rename("renamed/one", "renamed/two")
shutil.move("moved", "elsewhere")
os.truncate("cut.txt", 0)
assert Path("a/b/old.txt").read_text() == "old and new" and os.listdir("elsewhere") == ["x"]
assert not os.path.exists("tree") and os.path.getsize("cut.txt") == 0
"""


@pytest.mark.slow
def test_whatever_a_script_changes_in_its_folder_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/old.txt", "a/removed.txt", "entered/here.txt", "tree/in/x", "renamed/one", "moved/x", "cut.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    (tmp_path / "empty").mkdir()
    (tmp_path / "script.py").write_text(CHANGES)

    def state():
        return {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}

    before = state()
    found = verify("script.py", progress=False)
    assert "makes no update" in found.verdict, found.verdict  # and no assertion has failed
    assert state() == before


@pytest.mark.slow
def test_a_script_beside_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = os.path.relpath(PROGRAMS / "right" / "mlp.py")
    assert script.startswith(os.pardir)
    found = verify(script, 2, arguments=["bfloat16"], progress=False)
    assert found.right, str(found)


def test_low_precision_leaves_the_noise_for_good_or_not_at_all():
    nan = float("nan")
    noise = [Course((), (nan, 0.01, 0.02, 0.01), 0.01)]

    def leaves(*runs):
        found = low_departure_of([Course((), *run) for run in runs], noise)
        return found and (found.step, found.what)

    assert leaves(((nan, 0.9, 0.9, 0.9),)) == (2, "gradients")
    assert leaves(((nan, 0.01, 0.01, 0.9),)) is None  # of the last update none can say
    assert leaves(((nan, 0.9, 0.9, 0.9),), ((nan, 0.9, 0.01, 0.01),)) is None  # from other weights it does not
    assert leaves(((nan, 0.01, 0.01, 0.01), 0.6)) == (4, "weights")
    wide = [Course((), (nan, 0.1, 0.4, 0.4))]
    assert low_departure_of([Course((), (nan, 0.2, 0.9, 0.9))], wide) is None


@pytest.mark.slow
def test_files_that_stay_are_listed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept.txt"
    (folder / "other.py").write_text(f"open({str(elsewhere)!r}, 'w')\n" + SCRIPT.replace("assert sys", "sys"))
    found = verify("other.py", 2, progress=False)
    assert str(elsewhere) in found.written
    assert str(elsewhere) in str(found)


@pytest.mark.slow
def test_interrupting_the_command_ends_its_processes(folder):
    (folder / "slow.py").write_text(
        "import os, time\nopen('/proc/self/comm', 'w').write('ofverify')\nfor _ in range(600): time.sleep(0.1)\n"
    )
    code = "import sys; from mxmp.__main__ import main; sys.exit(main(['verify', 'slow.py']))"
    command = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while not children(command.pid) and time.monotonic() < until:
            time.sleep(0.1)
        (child,) = children(command.pid)
        time.sleep(0.5)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=30)
        assert command.returncode == 130
        assert "interrupted" in err
        assert not os.path.exists(f"/proc/{child}")
    finally:
        command.kill()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


# -- The picture -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_has_losses_and_the_band_of_noise(tmp_path):
    pytest.importorskip("matplotlib")
    found = verify(training(scaled), 4, progress=False)
    figure = plot_verification(found, str(tmp_path / "verify.svg"))
    assert (tmp_path / "verify.svg").exists()
    first, second = figure.axes
    drawn = {text.get_text() for text in first.get_legend().get_texts()}
    assert drawn >= {"plain MXNet", "mxmp in FP32", "float16"}
    assert "noise of one rounding" in [text.get_text() for text in second.get_legend().get_texts()]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_verification(verify(lambda: None, progress=False))
