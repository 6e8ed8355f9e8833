"""Messages and small habits: what fails says what failed, and what is ignored is said."""

from __future__ import annotations

import os
import warnings

import mxnet as mx
import numpy as np
import pytest
from kit.modules import SHAPES, mlp
from kit.takes import Takes, X
from kit.twins import array, seeded
from mxnet import autograd
from mxnet.gluon import nn

import mxmp
from mxmp.__main__ import main


def dense(**more):
    return seeded(nn.Dense(3, in_units=6, **more))


# -- the command line -------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    mlp().save(str(tmp_path / "net-symbol.json"))
    mx.nd.save(str(tmp_path / "net-0000.params"), {f"arg:{k}": mx.nd.ones(s) for k, s in SHAPES.items()})
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


@pytest.mark.parametrize("command", ["explain", "advise", "tune"])
def test_a_shape_of_an_input_with_the_name_of_an_argument_is_an_error_that_names_it(tmp_path, capsys, command):
    mx.sym.FullyConnected(mx.sym.var("target"), num_hidden=2, name="fc").save(str(tmp_path / "net-symbol.json"))
    more = ["--out", tmp_path / "plan.json"] if command == "tune" else []
    error = fails(capsys, tmp_path, command, tmp_path / "net-symbol.json", "--shape", "target=4,6", *more)
    assert "'target'" in error
    assert f"mxmp.{command}" in error


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
        mxmp.explain(mlp(), dta=(4, 6))


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
    module = mxmp.Module(mlp(), policy=mxmp.Policy("float16", exclude=["*"]))
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
]


def kind_of(number):
    return type(number).__name__


@pytest.mark.parametrize("number", NUMBERS, ids=kind_of)
@pytest.mark.parametrize("where", ["Trainer", "Module", "Static", "Dynamic", "Bucketing"])
def test_a_number_of_numpy_s_is_a_number(where, number):
    made = {
        "Trainer": lambda: mxmp.Trainer(dense().collect_params(), "sgd", loss_scale=number).loss_scale,
        "Module": lambda: mxmp.Module(mlp(), loss_scale=number).loss_scale,
        "Bucketing": lambda: mxmp.BucketingModule(lambda key: (mlp(), ["data"], None), 0, loss_scale=number) and 128,
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


def test_a_scaler_from_numbers_of_numpy_s_can_be_saved(tmp_path):
    net = mxmp.convert(dense())
    scaler = mxmp.DynamicLossScaler(np.float32(64), growth_interval=np.int32(3))
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scaler)
    trainer.save_states(str(tmp_path / "s"))
    trainer.load_states(str(tmp_path / "s"))


def takes(compute):
    net = Takes(compute)
    net.initialize()
    return mxmp.convert(net, "float16")


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.filterwarnings("ignore:.* is not used by any computation")
@pytest.mark.parametrize(
    ("compute", "cured", "said"),
    [
        (
            lambda block, op, x: op.khatri_rao(x, x),
            lambda block, op, x: op.BlockGrad(op.khatri_rao(x, x)),
            "operator khatri_rao has no gradient.*write F.BlockGrad",
        ),
        (
            lambda block, op, x: op.ones((2, 2)),
            lambda block, op, x: op.ones_like(x),
            "no output depends on an input.*such as F.ones_like",
        ),
    ],
    ids=["without a gradient", "without an input"],
)
@pytest.mark.parametrize("training", [False, True])
def test_what_mxnet_makes_no_graph_of_has_a_cure_that_cures(compute, cured, said, training):
    with autograd.record(training), pytest.raises(mx.MXNetError, match=said):
        takes(compute)(X)
    with autograd.record(training):
        takes(cured)(X).wait_to_read()
