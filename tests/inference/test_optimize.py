"""``optimize_for_inference`` end to end: right, served by plain MXNet, and plain about what does not pay."""

from __future__ import annotations

import json
import os

import gluonnlp as nlp
import mxnet as mx
import numpy as np
import pytest
from kit.blocks import Lambda
from kit.oracle import sqnr
from kit.served_networks import LOW, S, batches, conv, filled, warmed
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.profile import operators

import mxmp
from mxmp.__main__ import main
from mxmp.inference.runner import Runner
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow


def test_a_trained_network_keeps_its_answers(found, held):
    x, labels, reference = held
    got = found(x).asnumpy()
    assert sqnr(reference, got) > 18
    accuracy = [(scores.argmax(1) == labels).mean() for scores in (reference, got)]
    assert accuracy[0] > 0.9
    assert abs(accuracy[0] - accuracy[1]) <= 0.01


def test_full_precision_is_the_network_folded_and_fused(full, held):
    x, _, reference = held
    assert sqnr(reference, full(x).asnumpy()) > 110
    assert full.report.chosen.startswith("float32, ")
    assert not any("batchnorm" in name for name in full.collect_params())


def test_an_output_stays_what_it_is_after_the_next_call(found, full, images):
    for served in (found, full):
        first, second = (mx.nd.array(images[i : i + 8]) for i in (1500, 1600))
        out = served(first)
        before = out.copy().asnumpy()
        served(second).wait_to_read()
        np.testing.assert_array_equal(out.asnumpy(), before)


def test_a_served_graph_keeps_what_its_fused_operators_prepare(found, images):
    """Where MXNet runs each operator by itself, those that oneDNN fuses quantize and arrange their weights anew."""
    x = mx.nd.array(images[1500:1508])
    found(x)
    fused = sum(node.op.startswith("_sg_mkldnn") for node in Graph.from_symbol(found.symbol).nodes())
    assert sum(count for count, _ in operators(lambda: found(x)).values()) < fused


def test_recording_changes_nothing(found, images):
    x = mx.nd.array(images[1500:1508])
    with autograd.record():
        recorded = found(x)
    np.testing.assert_array_equal(recorded.asnumpy(), found(x).asnumpy())


def test_an_input_of_another_dtype_is_no_quantized_one(candidates, net):
    """MXNet's quantization leaves uint8 as it is; the network itself refuses it."""
    x = mx.nd.arange(2 * 64).reshape((2, 1, 8, 8)).astype("uint8")
    for served in (net, *candidates.values()):
        with pytest.raises((mx.MXNetError, ValueError)):
            served(x).asnumpy()


@pytest.mark.bfloat16_kernels
def test_weights_in_bfloat16_are_stored_so(candidates, tmp_path):
    sizes = {}
    for kind in ("float32, fused", "bfloat16"):
        file = candidates[kind].export(str(tmp_path / kind[:4]))[1]
        sizes[kind] = os.path.getsize(file)
    assert sizes["bfloat16"] < 0.6 * sizes["float32, fused"]
    nodes = json.loads(candidates["bfloat16"].symbol.tojson(remove_amp_cast=False))["nodes"]
    assert sum(node["op"] == "amp_cast" for node in nodes) <= 4  # of the input and of the output, not of weights


@pytest.mark.vnni
def test_a_product_that_int8_cannot_compute_is_left_out():
    """MobileNetV3's gates: ``quantized_elemwise_mul`` takes int8 only, and fails."""
    mx.random.seed(0)
    gate = nn.HybridLambda(lambda f, x: f.elemwise_mul(x, f.clip(x + 3, 0, 6) / 6))
    net = nn.HybridSequential(prefix="gated_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), gate, nn.Conv2D(8, 3, padding=1), nn.GlobalAvgPool2D(), nn.Flatten())
    warmed(net, 4, 3, 12, 12)
    data = [mx.nd.random.normal(shape=(4, 3, 12, 12)) for _ in range(3)]
    found = mxmp.optimize_for_inference(net, data, dtypes=["int8"], max_drop=1, min_sqnr=10)
    rows = {row.name: row for row in found.report.candidates}
    assert not rows["int8"].verdict
    assert rows["int8"].sqnr > 15
    x = mx.nd.random.normal(shape=(4, 3, 12, 12))
    assert sqnr(net(x).asnumpy(), found(x).asnumpy()) > 15


# -- what may go wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_run", [False, True])
def test_a_graph_that_is_added_again_under_its_name_replaces_the_first(has_run):
    symbol = conv(S.var("data"), "layer")
    params = filled(symbol, data=(2, 3, 8, 8))
    twice, thrice = (Graph.from_symbol(symbol * factor) for factor in (2, 3))
    with Runner([{"data": mx.nd.ones((2, 3, 8, 8))}]) as runner:
        runner.add("original", Graph.from_symbol(symbol), params)
        want = runner.ask("outputs", "original", [0])[0][0]
        runner.add("graph", twice, params)
        if has_run:
            np.testing.assert_allclose(runner.ask("outputs", "graph", [0])[0][0], 2 * want)
        runner.add("graph", thrice, params)
        runner.add("other", twice, params)
        np.testing.assert_allclose(runner.ask("outputs", "graph", [0])[0][0], 3 * want, rtol=1e-6)


@pytest.mark.vnni
def test_nothing_to_quantize_is_said():
    symbol = S.LayerNorm(S.var("data"), name="norm")
    params = filled(symbol, data=(4, 6))
    data = [mx.nd.random.normal(shape=(4, 6)) for _ in range(2)]
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params)
    assert any("nothing to quantize" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


def test_a_network_with_a_condition_takes_either_branch():
    """MXNet infers no shape behind a ``cond``, though it needs none."""
    net = Lambda(
        lambda f, net, x: net.last(f.contrib.cond(f.sum(x) > 0, lambda: net.first(x), lambda: net.second(x))),
        first=nn.Dense(4, in_units=6),
        second=nn.Dense(4, in_units=6),
        last=nn.Dense(3, in_units=4),
    )
    net.initialize()
    first, second = mx.nd.ones((4, 6)), -mx.nd.ones((4, 6))
    found = mxmp.optimize_for_inference(net, [first, second], dtypes=())
    for x in (first, second, first[:2]):
        assert sqnr(net(x).asnumpy(), found(x).asnumpy()) > 100


def test_a_network_whose_sizes_depend_on_values_is_refused():
    """An executor of MXNet that runs again with more rows than before writes behind its arrays."""
    symbol = S.contrib.boolean_mask(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"), S.var("rows"), name="few")
    params = filled(symbol.get_internals()["fc_output"], data=(4, 6))
    batch = {"data": np.ones((4, 6)), "rows": np.array([1, 0, 1, 1])}
    with pytest.raises(ValueError, match="'few' is a boolean_mask, whose size depends on values"):
        mxmp.optimize_for_inference(symbol, [batch] * 2, arg_params=params)


def test_a_custom_operator_is_refused_by_name():
    symbol = S.Custom(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"), op_type="doubled_here", name="twice")
    args = {"fc_weight": mx.nd.ones((3, 6)), "fc_bias": mx.nd.ones(3)}
    with pytest.raises(ValueError, match="'twice' is a Custom operator, which only this process can run"):
        mxmp.optimize_for_inference(symbol, [mx.nd.ones((4, 6))] * 2, arg_params=args)


@mx.operator.register("doubled_here")
class Doubled(mx.operator.CustomOpProp):
    """MXNet asks it for shapes; no test runs it."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate": 0.5}, "evaluate=0.5: expected a function"),
        ({"max_drop": None}, "max_drop=None: expected a number from 0"),
        ({"min_sqnr": float("nan")}, "min_sqnr=nan: expected a number of dB"),  # no outputs would be below it
        ({"min_sqnr": "20"}, "min_sqnr='20': expected a number of dB"),
        ({"dtypes": None}, "dtypes=None: expected names"),
        ({"evaluate": lambda served: None}, "evaluate returned None: expected a finite number"),
        ({"evaluate": lambda served: ("accuracy", 0.5)}, r"evaluate returned \('accuracy', 0.5\): expected"),
    ],
)
def test_options_that_are_no_limits_are_refused(net, options, message):
    with pytest.raises(ValueError, match=message):
        mxmp.optimize_for_inference(net, [mx.nd.ones((2, 1, 8, 8))], **options)


# -- the command line -------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(net, images, tmp_path):
    net(mx.nd.array(images[:2]))
    net.export(str(tmp_path / "net"))
    np.save(str(tmp_path / "data.npy"), np.stack([batch.asnumpy() for batch in batches(images)]))
    return tmp_path


def command(folder, *arguments):
    return main(["optimize", *(a.replace("@", f"{folder}{os.sep}") for a in arguments)])


def test_the_command_writes_files_and_a_report(checkpoint, held, capsys):
    files = ["@net-symbol.json", "@net-0000.params", "@data.npy", "@fast"]
    assert command(checkpoint, *files, "--dtypes", "int8", "--save", "@r.json", "--plot", "@p.png") == 0
    assert "Served: " in capsys.readouterr().out
    assert json.loads((checkpoint / "r.json").read_text())["candidates"]
    assert (checkpoint / "p.png").exists()
    files = f"{checkpoint}/fast-symbol.json", ["data"], f"{checkpoint}/fast-0000.params"
    with pytest.warns(UserWarning, match="Cannot decide type"):  # MXNet warns of every import
        served = gluon.SymbolBlock.imports(*files)
    assert sqnr(held[2], served(held[0]).asnumpy()) > 15


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no arrays", "holds no arrays of NumPy"),
        (b"PK\x03\x04, a damaged .npz", "holds no arrays of NumPy"),
        (np.zeros(3), "holds no batches"),
        (np.zeros((0, 2, 1, 8, 8)), "there is no calibration data"),
        (np.zeros((2, 2, 3, 8, 8)), "does not fit the network"),
        ({"data": np.zeros((2, 2, 1, 8, 8)), "other": np.zeros((3, 2))}, "different numbers of batches"),
    ],
)
def test_the_command_refuses_bad_data_in_one_line(checkpoint, data, message, capsys):
    path = checkpoint / ("bad.npz" if isinstance(data, dict) else "bad.npy")
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif isinstance(data, dict):
        np.savez(path, **data)
    else:
        np.save(path, data)
    assert command(checkpoint, "@net-symbol.json", "@net-0000.params", f"@{path.name}", "@fast") == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not (checkpoint / "fast-symbol.json").exists()


def test_the_command_refuses_to_write_a_file_twice(checkpoint, capsys):
    files = ["@net-symbol.json", "@net-0000.params", "@data.npy", "@twice", "--save", "@twice-symbol.json"]
    assert command(checkpoint, *files) == 2
    assert "twice-symbol.json' would be written twice" in capsys.readouterr().err


def test_the_command_refuses_parameters_that_leave_no_input_for_the_data(checkpoint, capsys):
    params = mx.nd.load(str(checkpoint / "net-0000.params"))
    mx.nd.save(str(checkpoint / "all.params"), {**params, "arg:data": mx.nd.ones((2, 1, 8, 8))})
    assert command(checkpoint, "@net-symbol.json", "@all.params", "@data.npy", "@fast") == 2
    assert "has all the symbol's inputs" in capsys.readouterr().err


@pytest.mark.parametrize("dtypes", LOW)
def test_a_transformer_is_folded_and_runs_in_every_dtype_also_without_mxmp(dtypes, tmp_path):
    """Its position embedding is a constant that is broadcast, whose shape MXNet cannot infer."""
    net = nlp.model.BERTEncoder(num_layers=1, units=32, hidden_size=64, num_heads=2, max_length=16, dropout=0)
    net.initialize()
    data = [mx.nd.random.normal(shape=(8, 4, 32)) for _ in range(3)]
    expected = net(data[0])[0].asnumpy()
    found = mxmp.optimize_for_inference(net, data, dtypes=dtypes, evaluate=lambda served: 1.0)
    assert not any("stays" in note for note in found.report.notes)
    assert not [each for each in found.report.candidates if each.verdict]
    assert len(found.report.candidates) == 4
    assert sqnr(expected, found(data[0]).asnumpy()) > 20
    found.export(str(tmp_path / "net"))
    module = mx.mod.Module.load(str(tmp_path / "net"), 0, label_names=None)
    module.bind([("data", (8, 4, 32))], for_training=False)
    module.forward(mx.io.DataBatch([data[0]]), is_train=False)
    assert sqnr(expected, module.get_outputs()[0].asnumpy()) > 20
