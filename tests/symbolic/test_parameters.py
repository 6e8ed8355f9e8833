"""``cast`` takes the parameters of the Symbol alone, and writes none that float16 cannot hold."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S

import mxmp
from mxmp.__main__ import main
from mxmp.symbolic.parameters import cast_parameters, check_parameters

IMAGE = (2, 3, 16, 16)


def symbol():
    x = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=8, num_group=1, name="conv")
    x = S.relu(S.BatchNorm(x, name="norm"), name="relu")
    x = S.Convolution(x, kernel=(3, 3), num_filter=8, num_group=4, name="grouped")
    x = S.FullyConnected(S.Pooling(x, global_pool=True, pool_type="avg"), num_hidden=6, name="dense")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=4, name="last"), name="softmax")


def parameters(made=None, **shapes):
    made = symbol() if made is None else made
    shapes = shapes or {"data": IMAGE}
    arguments, _, states = made.infer_shape(**shapes)
    rng = np.random.RandomState(0)
    names = {**dict(zip(made.list_arguments(), arguments))}
    found = {
        f"arg:{name}": mx.nd.array(rng.normal(0, 0.1, shape))
        for name, shape in names.items()
        if name not in shapes and "label" not in name
    }
    found.update({f"aux:{n}": mx.nd.ones(shape) for n, shape in zip(made.list_auxiliary_states(), states)})
    return found


def cast(folder, params, *more):
    symbol().save(str(folder / "net-symbol.json"))
    mx.nd.save(str(folder / "net.params"), params)
    files = [str(folder / name) for name in ("net-symbol.json", "net.params", "low")]
    return main(["cast", *files, "--device", "gpu", *more])


def refused(folder, capsys, params, *more):
    """The one line that is said, where nothing was written."""
    assert cast(folder, params, *more) == 2
    assert sorted(os.listdir(folder)) == ["net-symbol.json", "net.params"]
    (line,) = capsys.readouterr().err.splitlines()
    return line


SHAPES = [(), ("--shape", "data=2,3,16,16"), ("--shape", "data=2,3,16,16", "softmax_label=2")]


@pytest.mark.parametrize("shape", SHAPES)
def test_good_parameters_are_cast(shape, tmp_path):
    assert cast(tmp_path, parameters(), *shape) == 0
    assert mx.nd.load(str(tmp_path / "low-0000.params"))["arg:dense_weight"].dtype == np.float16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", [key for key in parameters() if key != "arg:conv_weight"])
def test_a_parameter_of_another_size_is_named_with_both_sizes(key, shape, tmp_path, capsys):
    good = parameters()
    for axis in range(good[key].ndim):
        size = list(good[key].shape)
        size[axis] += 1
        line = refused(tmp_path, capsys, {**good, key: mx.nd.ones(size)}, *shape)
        assert "does not fit the symbol" in line
        assert f"has shape {tuple(size)}, expected (" in line
        assert line.startswith(f"python -m mxmp cast: '{tmp_path / 'net.params'}'")
        if shape or key != "arg:dense_weight":
            assert f" {key[4:]} has shape" in line
    refused(tmp_path, capsys, {**good, key: good[key].expand_dims(0)}, *shape)


def test_what_depends_on_the_input_is_checked_with_its_shape(tmp_path, capsys):
    params = {**parameters(), "arg:conv_weight": mx.nd.ones((8, 4, 3, 3))}
    assert cast(tmp_path, params) == 0
    for name in ("low-symbol.json", "low-0000.params"):
        os.unlink(tmp_path / name)
    capsys.readouterr()
    line = refused(tmp_path, capsys, params, "--shape", "data=2,3,16,16")
    assert "conv_weight has shape (8, 4, 3, 3), expected (8, 3, 3, 3)" in line


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", list(parameters()))
def test_a_parameter_that_is_missing_is_named(key, shape, tmp_path, capsys):
    params = {name: value for name, value in parameters().items() if name != key}
    assert f"it lacks {key[4:]}" in refused(tmp_path, capsys, params, *shape)


@pytest.mark.parametrize(
    ("key", "instead", "message"),
    [
        ("aux:norm_moving_mean", "arg:norm_moving_mean", "norm_moving_mean is an auxiliary state of the symbol"),
        ("arg:dense_bias", "aux:dense_bias", "dense_bias is an argument of the symbol"),
    ],
)
def test_an_argument_for_an_auxiliary_state_is_refused(key, instead, message, tmp_path, capsys):
    params = parameters()
    value = params.pop(key)
    line = refused(tmp_path, capsys, {**params, instead: value})
    assert message in line
    assert f"expected {key!r}, got {instead!r}" in line
    assert message in refused(tmp_path, capsys, {**params, key: value, instead: value})


@pytest.mark.parametrize("value", [65520.0, -65520.0, 7e4, -1e30])
def test_a_weight_beyond_float16_is_refused_by_name(value, tmp_path, capsys):
    params = parameters()
    params["arg:dense_weight"][1, 2] = value
    line = refused(tmp_path, capsys, params)
    assert "dense_weight has a value of size" in line
    assert f"{abs(value):g}" in line
    assert "65504" in line
    assert cast(tmp_path, params, "--exclude", "dense") == 0
    assert mx.nd.load(str(tmp_path / "low-0000.params"))["arg:dense_weight"][1, 2].asscalar() == np.float32(value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_what_float16_can_hold_is_written_and_what_was_infinite_stays(dtype, tmp_path):
    values = np.array([65504.0, 65519.0, -65504.0, np.inf, -np.inf, np.nan], dtype)
    low = mxmp.cast_symbol(S.FullyConnected(S.var("data"), num_hidden=6, name="fc"), "float16", ctx=mx.gpu())
    found = cast_parameters({"arg:fc_bias": mx.nd.array(values, dtype=dtype)}, low)["arg:fc_bias"]
    assert found.dtype == np.float16
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found.asnumpy(), values.astype("float16"))


def test_weights_on_a_cpu_stay_as_they_are(tmp_path):
    params = parameters()
    params["arg:dense_weight"][1, 2] = 1e6
    assert cast(tmp_path, params, "--device", "cpu") == 0


# -- Networks whose sizes are not all known ---------------------------------------------------------


def test_a_weight_that_is_an_input_is_said_to_be_one(tmp_path):
    made = S.FullyConnected(S.var("data"), S.var("weight"), no_bias=True, num_hidden=3, name="fc")
    with pytest.raises(ValueError, match="it lacks weight"):
        check_parameters(made, {}, {})
    check_parameters(made, {}, {"weight": (3, 4)})


def test_a_graph_for_one_size_of_input_is_checked_with_it_only():
    x = S.broadcast_add(S.var("data"), S.var("table", shape=(1, 3, 4, 4)))
    made = S.FullyConnected(x, num_hidden=3, name="fc")
    params = {"arg:fc_weight": mx.nd.ones((3, 47)), "arg:fc_bias": mx.nd.ones((3,))}
    params["arg:table"] = mx.nd.ones((1, 3, 4, 4))
    assert not check_parameters(made, params, {})
    with pytest.raises(ValueError, match=r"fc_weight has shape \(3, 47\), expected \(3, 48\)"):
        check_parameters(made, params, {"data": (2, 3, 4, 4)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: S.RNN(S.var("data"), S.var("p"), S.var("h"), state_size=4, num_layers=2, mode="gru", name="rnn"),
        lambda: S.FullyConnected(
            S.Embedding(S.var("data"), input_dim=9, output_dim=5, name="e"), num_hidden=3, name="f"
        ),
        lambda: S.LeakyReLU(S.FullyConnected(S.var("data"), num_hidden=3, name="f"), act_type="prelu", name="p"),
        lambda: S.LayerNorm(S.FullyConnected(S.var("data"), num_hidden=3, flatten=False, name="f"), name="n"),
        lambda: S.Deconvolution(S.var("data"), kernel=(2, 2), num_filter=4, num_group=2, name="d"),
        lambda: (
            S.FullyConnected(S.var("data"), num_hidden=3, name="f") + S.FullyConnected(S.var("other"), num_hidden=3)
        ),
    ],
)
def test_good_parameters_of_other_operators_fit_with_and_without_shapes(make):
    with mx.name.NameManager():
        made = make()
    shapes = {"data": (2, 6, 4, 4)} if "d_weight" in made.list_arguments() else {"data": (2, 6)}
    if "h" in made.list_arguments():
        shapes = {"data": (5, 2, 6), "h": (2, 2, 4)}
    if "other" in made.list_arguments():
        shapes["other"] = (2, 7)
    params = parameters(made, **shapes)
    check_parameters(made, params, shapes)
    check_parameters(made, params, {})


def test_a_size_of_the_input_is_the_same_in_all_parameters():
    x = S.var("data")
    layers = S.Group([S.FullyConnected(x, num_hidden=n, name=f"fc{n}") for n in (2, 3)])
    saved = {
        f"arg:fc{n}_{kind}": mx.nd.ones((n, 5) if kind == "weight" else n)
        for n in (2, 3)
        for kind in ("weight", "bias")
    }
    check_parameters(layers, saved, {})
    with pytest.raises(ValueError, match=r"fc3_weight has shape \(3, 6\), expected \(3, 5\)"):
        check_parameters(layers, {**saved, "arg:fc3_weight": mx.nd.ones((3, 6))}, {})
