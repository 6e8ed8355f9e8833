"""A run writes into a folder of its own; the user's files stay as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from support.ports import PROGRAMS

from mxmp.__main__ import main
from mxmp.diagnose import verify

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


@pytest.mark.slow
def test_a_run_ends_at_its_next_step_once_the_command_is_gone(folder):
    (folder / "long.py").write_text(
        "import mxnet as mx, mxmp\n"
        "net = mx.gluon.nn.Dense(1, in_units=1)\n"
        "net.initialize()\n"
        "trainer = mxmp.Trainer(mxmp.convert(net).collect_params(), 'sgd')\n"
        "for _ in range(10**6):\n"
        "    with mx.autograd.record():\n"
        "        loss = net(mx.nd.ones((1, 1)))\n"
        "    trainer.backward(loss)\n"
        "    trainer.step(1)\n"
    )
    code = "import sys; from mxmp.__main__ import main; sys.exit(main(['verify', 'long.py', '--steps', '1000000']))"
    command = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not children(command.pid) and time.monotonic() < until:
        time.sleep(0.1)
    (child,) = children(command.pid)
    command.kill()
    command.wait()
    while os.path.exists(f"/proc/{child}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{child}")


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
