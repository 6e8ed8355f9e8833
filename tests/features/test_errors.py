"""Commands whose files or shapes are wrong, and code that MXNet makes no graph of: what fails says what failed."""

from __future__ import annotations

import os

import mxnet as mx
import pytest
from kit.modules import mlp
from kit.takes import Takes, X
from mxnet import autograd

import mxmp
from mxmp.__main__ import main

# -- the command line -------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    mlp().save(str(tmp_path / "net-symbol.json"))
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


def test_cast_into_a_folder_that_no_one_may_write_to_names_the_folder(checkpoint, capsys):
    error = fails(capsys, checkpoint, "cast", checkpoint / "net-symbol.json", "/proc/low")
    assert "/proc" in error
    assert ".part" not in error
    assert "Check failed" not in error


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


# -- graphs -----------------------------------------------------------------------------------------


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
