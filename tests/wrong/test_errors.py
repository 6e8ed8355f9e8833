"""Messages and small habits: what fails says what failed, and what is ignored is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings
from fractions import Fraction
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib import estimator
from twins import MASTERS, array, assert_close, seeded

import mxmp
from mxmp.__main__ import main

LOSS = gluon.loss.L2Loss()


def symbol():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3, name="fc2"), name="softmax")


def dense(**more):
    return seeded(nn.Dense(3, in_units=6, **more))


# -- the command line -------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    symbol().save(str(tmp_path / "net-symbol.json"))
    shapes = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}
    mx.nd.save(str(tmp_path / "net-0000.params"), {f"arg:{k}": mx.nd.ones(s) for k, s in shapes.items()})
    return tmp_path


def fails(capsys, folder, *arguments):
    """The one line on stderr of a command that fails."""
    before = sorted(os.listdir(folder))
    assert main([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert "Wrote" not in said.out
    assert "\n" not in said.err.strip()
    assert sorted(os.listdir(folder)) == before
    return said.err


@pytest.mark.parametrize("params", [True, False])
def test_cast_into_a_missing_folder_names_the_folder(checkpoint, capsys, params):
    given = [checkpoint / "net-symbol.json", *([checkpoint / "net-0000.params"] if params else [])]
    error = fails(capsys, checkpoint, "cast", *given, checkpoint / "missing" / "low")
    assert str(checkpoint / "missing") in error
    assert ".part" not in error
    assert "Check failed" not in error


@pytest.mark.parametrize("params", [True, False])
def test_cast_onto_a_folder_or_below_a_file_names_it(checkpoint, capsys, params):
    (checkpoint / "low-symbol.json").mkdir()
    given = [checkpoint / "net-symbol.json", *([checkpoint / "net-0000.params"] if params else [])]
    assert "low-symbol.json" in fails(capsys, checkpoint, "cast", *given, checkpoint / "low")
    (checkpoint / "file").write_text("")
    error = fails(capsys, checkpoint, "cast", *given, checkpoint / "file" / "low")
    assert str(checkpoint / "file") in error
    assert ".part" not in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cast_into_a_read_only_folder_names_the_folder(checkpoint, capsys):
    folder = checkpoint / "readonly"
    folder.mkdir(mode=0o500)
    error = fails(capsys, checkpoint, "cast", checkpoint / "net-symbol.json", folder / "low")
    assert str(folder) in error
    assert ".part" not in error


def test_cast_into_a_folder_that_no_one_may_write_to_names_the_folder(checkpoint, capsys):
    error = fails(capsys, checkpoint, "cast", checkpoint / "net-symbol.json", "/proc/low")
    assert "/proc" in error
    assert ".part" not in error
    assert "Check failed" not in error


@pytest.mark.parametrize("command", ["explain", "cast"])
def test_a_shape_of_an_input_that_does_not_exist_is_an_error_that_lists_those_that_do(checkpoint, capsys, command):
    out = [checkpoint / "low"] if command == "cast" else []
    error = fails(capsys, checkpoint, command, checkpoint / "net-symbol.json", *out, "--shape", "dta=4,6")
    assert "dta" in error
    assert "data" in error.replace("dta", "")


@pytest.mark.parametrize("shape", ["data=4,7,x", "data=", "data=4,-6", "data=0,6", "=4,6", "data"])
def test_a_shape_that_is_none_is_an_error(checkpoint, capsys, shape):
    error = fails(capsys, checkpoint, "explain", checkpoint / "net-symbol.json", "--shape", shape)
    assert shape in error


def test_a_shape_that_does_not_fit_is_an_error(checkpoint, capsys):
    """12 features meet a weight that the checkpoint's other inputs make 6 wide."""
    arguments = ["--shape", "data=4,12", "fc1_weight=5,6"]
    error = fails(capsys, checkpoint, "explain", checkpoint / "net-symbol.json", *arguments)
    assert "shape" in error.lower()


def test_explain_of_a_symbol_names_a_shape_of_no_input():
    with pytest.raises(ValueError, match=r"dta.*data"):
        mxmp.explain(symbol(), dta=(4, 6))


def test_cast_with_an_exclude_that_matches_nothing_says_so(checkpoint, capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status = main(["cast", str(checkpoint / "net-symbol.json"), str(checkpoint / "low"), "--exclude", "fc9"])
    said = capsys.readouterr()
    assert status == 2 or "fc9" in said.err + said.out + "".join(str(w.message) for w in caught)


# -- exclude ----------------------------------------------------------------------------------------


def block_of(kind):
    net = nn.Sequential() if kind == "plain Block around hybrid ones" else nn.HybridSequential()
    for _ in range(1 if kind == "one block" else 2):
        net.add(nn.Dense(6, in_units=6))
    return seeded(net)


def convert_and_call(kind):
    mxmp.convert(block_of(kind), "float16", exclude=["*"])(array(0, 4, 6))


def bind_module(_):
    module = mxmp.Module(symbol(), policy=mxmp.Policy("float16", exclude=["*"]))
    module.bind([("data", (4, 6))], [("softmax_label", (4,))])


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (convert_and_call, "one block"),
        (convert_and_call, "two blocks"),
        (convert_and_call, "plain Block around hybrid ones"),
        (bind_module, "module"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_excluding_everything_is_said(run, kind):
    refused = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(kind)
        except ValueError as error:
            refused = str(error)
    assert "nothing" in refused or any("nothing" in str(warning.message) for warning in caught)


def test_a_pattern_of_convert_that_matches_nothing_is_said_at_the_first_call():
    net = mxmp.convert(dense(), exclude=["*nosuchblock*"])
    with pytest.warns(UserWarning, match="nosuchblock"):
        net(array(0, 4, 6))


# -- numbers ----------------------------------------------------------------------------------------

NUMBERS = [
    np.float32(128),
    np.float64(128),
    np.float16(128),
    np.int32(128),
    np.int64(128),
    np.array(128.0),
    Fraction(128),
]


def kind_of(number):
    return type(number).__name__


@pytest.mark.parametrize("number", NUMBERS[:5], ids=kind_of)
@pytest.mark.parametrize("where", ["Trainer", "Module", "Static", "Dynamic", "Bucketing"])
def test_a_number_of_numpy_s_is_a_number(where, number):
    made = {
        "Trainer": lambda: mxmp.Trainer(dense().collect_params(), "sgd", loss_scale=number).loss_scale,
        "Module": lambda: mxmp.Module(symbol(), loss_scale=number).loss_scale,
        "Bucketing": lambda: mxmp.BucketingModule(lambda key: (symbol(), ["data"], None), 0, loss_scale=number) and 128,
        "Static": lambda: mxmp.StaticLossScaler(number).loss_scale,
        "Dynamic": lambda: mxmp.DynamicLossScaler(number, growth_interval=np.int64(5)).loss_scale,
    }[where]()
    assert made == 128
    assert type(made) in (int, float)


@pytest.mark.parametrize(
    "bad", [np.float32("nan"), np.float32("inf"), np.float64(-1), np.bool_(True), True, 0], ids=str
)
def test_what_is_no_scale_stays_refused(bad):
    with pytest.raises(ValueError, match=r"scale"):
        mxmp.Trainer(dense().collect_params(), "sgd", loss_scale=bad)


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.int64(1)], ids=kind_of)
def test_clip_global_norm_takes_a_number_of_numpy_s(number):
    net = mxmp.convert(dense())
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=8.0)
    with autograd.record():
        loss = net(array(0, 4, 6)).sum()
    trainer.backward(loss)
    assert trainer.clip_global_norm(number) > 0
    trainer.step(np.int64(4))


def test_a_scaler_from_numbers_of_numpy_s_can_be_saved(tmp_path):
    net = mxmp.convert(dense())
    scaler = mxmp.DynamicLossScaler(np.float32(64), growth_interval=np.int32(3))
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scaler)
    trainer.save_states(str(tmp_path / "s"))
    trainer.load_states(str(tmp_path / "s"))


# -- estimator and data loader ----------------------------------------------------------------------


def test_a_batch_processor_without_our_trainer_says_what_it_needs():
    net = dense()
    plain = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    made = estimator.Estimator(net, LOSS, trainer=plain, batch_processor=mxmp.BatchProcessor())
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(array(0, 4, 6), array(1, 4, 3)), 2)
    with pytest.raises((TypeError, ValueError), match=r"mxmp\.Trainer"):
        made.fit(data, epochs=1)


SHARED_MEMORY = """
import warnings
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
import mxmp
net = nn.Dense(3, in_units=6)
net.initialize()
if {hybridize}:
    net.hybridize()
if {convert}:
    mxmp.convert(net)
x = mx.nd.ones((4, 6), ctx=mx.Context("cpu_shared", 0))
try:
    print(net(x).shape)
except Exception as error:
    print(type(error).__name__, str(error).replace(chr(10), " "))
"""


def shared_memory(**how):
    command = [sys.executable, "-W", "ignore", "-c", SHARED_MEMORY.format(**how)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


def test_a_batch_in_shared_memory_works_or_the_error_says_to_copy_it():
    plain = shared_memory(convert=False, hybridize=False)
    ours = shared_memory(convert=True, hybridize=False)
    assert ours == plain or ("cpu_shared" in ours and "as_in_context" in ours), ours


# -- true gradients of an input ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float16", MASTERS, "bfloat16"], ids=str)
def test_there_is_a_documented_way_to_true_gradients_of_an_input(policy):
    """``x.grad`` is scaled after ``backward``, and stays so; the manual must say how to get the true one."""

    def gradient(policy):
        net = dense()
        x = array(0, 4, 6)
        x.attach_grad()
        if policy is not None:
            mxmp.convert(net, policy)
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=1.0 if policy is None else 256.0)
        with autograd.record():
            loss = (net(x) ** 2).sum()
        trainer.backward(loss)
        scale = trainer.loss_scale
        trainer.step(4)
        return x.grad.asnumpy() / scale

    assert_close([gradient(policy)], [gradient(None)], "bfloat16" if policy == "bfloat16" else "float16")
    pages = Path(mxmp.__file__).parents[1] / "docs"
    text = " ".join(page.read_text(encoding="utf-8") for page in pages.glob("*.md"))
    assert re.search(r"`x\.grad", text), "no page of the manual says that the gradient of an input is scaled"


# -- bind -------------------------------------------------------------------------------------------

BIND = """
import os
import mxnet as mx
import mxmp
before = dict(os.environ)
head = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), name="softmax")
for train in (True, False):
    module = mxmp.Module(head)
    module.bind([("data", (4, 6))], [("softmax_label", (4,))], for_training=train)
    module.init_params()
    module.forward(mx.io.DataBatch([mx.nd.ones((4, 6))], [mx.nd.zeros((4,))]), is_train=False)
    module.get_outputs()[0].asnumpy()
assert dict(os.environ) == before
"""


def test_bind_prints_nothing():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BIND], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "MXNET_SUBGRAPH_BACKEND" not in run.stdout + run.stderr


def test_bind_leaves_the_environment_as_other_threads_see_it():
    """A reader in another thread never sees a variable of MXNet's that nobody set."""
    code = textwrap.dedent(
        """
        import os, sys, threading
        import mxnet as mx, mxmp
        names = ("MXNET_SUBGRAPH_BACKEND", "MXNET_UPDATE_ON_KVSTORE")
        seen, done = set(), threading.Event()
        def watch():
            while not done.is_set():
                seen.update(name for name in names if name in os.environ)
        thread = threading.Thread(target=watch)
        sys.setswitchinterval(1e-5)
        thread.start()
        head = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), name="softmax")
        for _ in range(30):
            module = mxmp.Module(head)
            module.bind([("data", (4, 6))], [("softmax_label", (4,))])
            module.init_params()
            module.init_optimizer()
        done.set()
        thread.join()
        sys.exit(len(seen))
        """
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False, timeout=60)
    assert run.returncode == 0
