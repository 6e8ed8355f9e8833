"""A graph whose operators were fused, for inference, is refused by name wherever a network enters."""

from __future__ import annotations

import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.__main__ import main
from mxmp.precision.graph import Graph
from mxmp.serving.folding import without_identities
from mxmp.serving.fusing import fuse
from mxmp.symbolic.checkpoint import write_arrays, write_symbol

SHAPE = (2, 3, 6, 6)
DTYPES = ["float16", "bfloat16"]


@pytest.fixture(scope="module")
def fused():
    """A fused Symbol, as ``optimize_for_inference`` exports it, and its parameters."""
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    x = mx.sym.Activation(x, act_type="relu", name="relu")
    symbol = mx.sym.FullyConnected(x, num_hidden=2, name="dense")
    made = fuse(without_identities(Graph.from_symbol(symbol))).to_symbol()
    shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(data=SHAPE)[0]))
    return made, {name: mx.nd.ones(shape) for name, shape in shapes.items() if name != "data"}


@pytest.fixture
def files(fused, tmp_path):
    prefix = str(tmp_path / "fast")
    write_symbol(f"{prefix}-symbol.json", fused[0], remove_amp_cast=False)
    write_arrays(f"{prefix}-0000.params", {f"arg:{name}": value for name, value in fused[1].items()})
    np.save(tmp_path / "data.npy", np.ones((2, *SHAPE), "float32"))
    return prefix


def imported(prefix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet cannot infer the dtype of a fused operator's input
        return gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")


def around(prefix):
    net = nn.HybridSequential()
    net.add(imported(prefix), nn.Dense(2))
    net[1].initialize()
    return net


X = mx.nd.ones(SHAPE)
DOORS = {
    "cast_symbol": lambda prefix, dtype: mxmp.cast_symbol(mx.sym.load(f"{prefix}-symbol.json"), dtype),
    "Module": lambda prefix, dtype: mxmp.Module(mx.sym.load(f"{prefix}-symbol.json"), policy=dtype),
    "Module.load": lambda prefix, dtype: mxmp.Module.load(prefix, 0, policy=dtype),
    "convert": lambda prefix, dtype: mxmp.convert(imported(prefix), dtype),
    "convert of a parent": lambda prefix, dtype: mxmp.convert(around(prefix), dtype),
    "optimize of a Symbol": lambda prefix, dtype: mxmp.optimize_for_inference(
        mx.sym.load(f"{prefix}-symbol.json"), [X], arg_params=mx.model.load_checkpoint(prefix, 0)[1]
    ),
    "optimize of a block": lambda prefix, dtype: mxmp.optimize_for_inference(imported(prefix), [X]),
    "explain": lambda prefix, dtype: mxmp.explain(mx.sym.load(f"{prefix}-symbol.json"), policy=dtype),
    "audit": lambda prefix, dtype: mxmp.diagnose.audit(imported(prefix), None, X, policy=dtype),
    "audit of a Symbol": lambda prefix, dtype: mxmp.diagnose.audit(
        mx.sym.load(f"{prefix}-symbol.json"),
        None,
        {"data": X},
        params=mx.nd.load(f"{prefix}-0000.params"),
        policy=dtype,
    ),
    "tune": lambda prefix, dtype: mxmp.tune(mx.sym.load(f"{prefix}-symbol.json"), policy=dtype, data=SHAPE),
    "tune of a block": lambda prefix, dtype: mxmp.tune(imported(prefix), X, policy=dtype),
    "advise": lambda prefix, dtype: mxmp.diagnose.advise(mx.sym.load(f"{prefix}-symbol.json"), data=SHAPE),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("door", DOORS)
def test_a_fused_graph_is_refused_by_name(files, door, dtype):
    with pytest.raises(ValueError, match="'relu' is fused"):
        DOORS[door](files, dtype)


COMMANDS = {
    "cast": ["SYMBOL", "PARAMS", "OUT"],
    "explain": ["SYMBOL"],
    "tune": ["SYMBOL", "--out", "PLAN", "--shape", "data=2,3,6,6"],
    "optimize": ["SYMBOL", "PARAMS", "DATA", "OUT"],
    "audit": ["SYMBOL", "PARAMS", "DATA"],
    "advise": ["SYMBOL", "--shape", "data=2,3,6,6"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_fused_graph_by_name(files, tmp_path, capsys, command):
    paths = {"SYMBOL": f"{files}-symbol.json", "PARAMS": f"{files}-0000.params", "DATA": str(tmp_path / "data.npy")}
    paths.update({"OUT": str(tmp_path / "out"), "PLAN": str(tmp_path / "plan.json")})
    assert main([command, *(paths.get(word, word) for word in COMMANDS[command])]) == 2
    assert "'relu' is fused" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npy", "fast-0000.params", "fast-symbol.json"]


def test_a_net_that_was_refused_runs_as_before(files):
    net = around(files)
    before = net(X).asnumpy()
    with pytest.raises(ValueError, match="is fused"):
        mxmp.convert(net, "float16")
    assert np.array_equal(net(X).asnumpy(), before)
