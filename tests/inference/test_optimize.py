"""``optimize_for_inference`` end to end: right, served by plain MXNet, and plain about what does not pay."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys

import gluonnlp as nlp
import mxnet as mx
import numpy as np
import pytest
from kit.oracle import sqnr
from kit.served_networks import S, batches, conv, digits, filled, forward, preactivation, relu, warmed
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn
from support.profile import operators

import mxmp
from mxmp import cpu
from mxmp.__main__ import main
from mxmp.inference import calibration, quantizing, search
from mxmp.inference.report import Candidate, InferenceReport
from mxmp.inference.runner import CandidateError, Runner
from mxmp.inference.targets import OptimizedSymbol
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow
LOW = [
    pytest.param("bfloat16", marks=pytest.mark.bfloat16_kernels),
    pytest.param("int8", marks=pytest.mark.vnni),
]


@pytest.fixture(scope="module")
def held(net, images):
    """Digits that neither trained nor calibrated, their labels, and what FP32 says."""
    x = mx.nd.array(images[1500:])
    return x, digits()[1][1500:], net(x).asnumpy()


@pytest.fixture(scope="module")
def found(net, images):
    return mxmp.optimize_for_inference(net, batches(images))


@pytest.fixture(scope="module")
def full(net, images):
    return mxmp.optimize_for_inference(net, batches(images), dtypes=())


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


def test_an_optimized_network_is_refused(found, images):
    with pytest.raises(ValueError, match="is fused"):
        mxmp.optimize_for_inference(found, batches(images))


def test_a_net_on_another_cpu_context_is_optimized_too():
    with mx.cpu(1):
        net = nn.Dense(3, in_units=2)
        net.initialize(ctx=mx.cpu(1))
        x = mx.nd.random.normal(shape=(4, 2))
        reference = net(x).asnumpy()
        found = mxmp.optimize_for_inference(net, [x], dtypes=())
    assert sqnr(reference, found(x.as_in_context(mx.cpu())).asnumpy()) > 100


@pytest.mark.bfloat16_kernels
@pytest.mark.vnni
def test_all_candidates_are_in_the_report(found):
    report = found.report
    rows = {row.name: row for row in report.candidates}
    assert {"float32", "float32, folded", "float32, fused", "bfloat16", "int8"} <= set(rows)
    assert rows["bfloat16"].sqnr > 35
    assert rows["int8"].sqnr > 15
    assert set(report.calibrators) == {"min/max", "entropy", "percentile 99.99"}
    assert report.baseline.startswith("float32")
    if not report.chosen.startswith("float32"):
        assert rows[report.chosen].gain[0] > 1
    text = str(report)
    assert f"* {report.chosen}" in text
    assert "times as fast" in text


SERVED = """
import sys
import gluonnlp as nlp
import mxnet as mx
import numpy as np

assert "mxmp" not in sys.modules
(prefix,) = sys.argv[1:]
x = mx.nd.array(np.load(prefix + ".npy"))
net = mx.gluon.SymbolBlock.imports(prefix + "-symbol.json", ["data"], prefix + "-0000.params")
net.hybridize()
out = [net(x[:rows]).asnumpy() for rows in (32, 1, 7)]
for rows in (32, 1, 7):
    module = mx.mod.Module.load(prefix, 0, label_names=None)
    module.bind([("data", (rows, *x.shape[1:]))], for_training=False)
    module.forward(mx.io.DataBatch([x[:rows]]), is_train=False)
    out.append(module.get_outputs()[0].asnumpy())
np.savez(prefix, *out)
"""


@pytest.mark.parametrize("kind", ["float32, fused", *LOW])
def test_an_export_loads_in_plain_mxnet_with_the_same_bits(candidates, kind, held, tmp_path):
    """By ``SymbolBlock.imports`` and by ``Module``, with any batch size."""
    served, x = candidates[kind], held[0][:32]
    prefix = str(tmp_path / "net")
    assert served.export(prefix) == (f"{prefix}-symbol.json", f"{prefix}-0000.params")
    np.save(f"{prefix}.npy", x.asnumpy())
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = [sys.executable, "-W", "ignore", "-c", SERVED, prefix]
    subprocess.run(run, check=True, env=environment, cwd=tmp_path, timeout=120, capture_output=True)
    with np.load(f"{prefix}.npz") as out:
        for rows, array in zip((32, 1, 7) * 2, out.values()):
            np.testing.assert_array_equal(array, served(x[:rows]).asnumpy())


@pytest.mark.parametrize("kind", ["float32, fused", *LOW])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda served: pickle.loads(pickle.dumps(served))])
def test_a_copy_computes_the_same(candidates, kind, again, held):
    """Also one of a Symbol, whose casts MXNet drops when it is pickled."""
    served, x = candidates[kind], held[0][:8]
    want = served(x).asnumpy()
    np.testing.assert_array_equal(again(served)(x).asnumpy(), want)
    symbol = again(OptimizedSymbol(Graph.from_symbol(served.symbol), served.arg_params, served.report))
    np.testing.assert_array_equal(forward(symbol.symbol, symbol.arg_params, data=x)[0], want)
    assert symbol.report == served.report


def test_an_input_of_another_dtype_is_no_quantized_one(candidates, net):
    """MXNet's quantization leaves uint8 as it is; the network itself refuses it."""
    x = mx.nd.arange(2 * 64).reshape((2, 1, 8, 8)).astype("uint8")
    for served in (net, *candidates.values()):
        with pytest.raises((mx.MXNetError, ValueError)):
            served(x).asnumpy()


@pytest.mark.bfloat16_kernels
@pytest.mark.vnni
def test_layers_that_leave_int8_compute_in_bfloat16(net, images):
    """Of INT8 graphs only the first, with all layers in it, is refused."""
    counts, low = [], []

    def evaluate(served):
        counts.append(served.symbol.tojson(remove_amp_cast=False).count('"name": "quantized_'))
        if counts[-1]:
            low.append(sum("bfloat16" in str(param.dtype) for param in served.collect_params().values()))
        return float(counts[-1] < max(counts) or not counts[-1])

    report = mxmp.optimize_for_inference(net, batches(images), evaluate=evaluate, max_drop=0.5).report
    (row,) = [row for row in report.candidates if row.name.startswith("int8, ") and row.name.endswith("in bfloat16")]
    assert not row.verdict
    assert max(low) > 0


@pytest.fixture(scope="module")
def candidates(net, images):
    """Each candidate as it would be served."""
    kept = {}

    def evaluate(served):
        dtypes = {
            p.dtype if isinstance(p.dtype, str) else str(np.dtype(p.dtype)) for p in served.collect_params().values()
        }
        ops = served.symbol.tojson(remove_amp_cast=False)
        kind = "int8" if "quantize" in ops else "bfloat16" if any("bfloat16" in d for d in dtypes) else "float32, fused"
        kept[kind] = served
        return 1.0

    mxmp.optimize_for_inference(net, batches(images), evaluate=evaluate)
    return kept


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
def test_layers_leave_int8_until_evaluate_is_content(net, images, held):
    asked = []

    def evaluate(served):
        """Loses as soon as the first convolution is in INT8."""
        operators = [node.name for node in Graph.from_symbol(served.symbol).nodes()]
        asked.append(operators)
        return 0.0 if any(name.startswith("quantized_digits_relu0") for name in operators) else 1.0

    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["int8"], evaluate=evaluate, max_drop=0.5)
    rows = {row.name: row for row in found.report.candidates}
    assert rows["int8"].verdict == "loses 1"
    assert any(name.startswith("int8, ") and not row.verdict for name, row in rows.items())
    assert sqnr(held[2], found(held[0]).asnumpy()) > 15


@pytest.mark.vnni
def test_where_nothing_is_right_enough_it_says_so(net, images, held):
    found = mxmp.optimize_for_inference(net, batches(images), min_sqnr=90)
    assert found.report.chosen.startswith("float32")
    assert any("no graph with a layer in it is accurate" in note for note in found.report.notes)
    assert sqnr(held[2], found(held[0]).asnumpy()) > 110


def test_a_symbol_gives_a_symbol_with_parameters():
    symbol = S.SoftmaxOutput(S.FullyConnected(preactivation(True), num_hidden=4, name="fc"), name="softmax")
    params = filled(symbol, data=(4, 3, 12, 12))
    args = {name: value for name, value in params.items() if name in symbol.list_arguments() and "label" not in name}
    auxs = {name: value for name, value in params.items() if name in symbol.list_auxiliary_states()}
    data = mx.io.NDArrayIter(np.random.RandomState(0).normal(size=(12, 3, 12, 12)).astype("float32"), batch_size=4)
    found = mxmp.optimize_for_inference(
        symbol, data, dtypes=["int8"], min_sqnr=5, max_drop=1, arg_params=args, aux_params=auxs
    )
    assert found.symbol.list_outputs() == symbol.list_outputs()
    assert "softmax_label" in found.symbol.list_arguments()
    x = mx.nd.random.normal(shape=(4, 3, 12, 12))
    label = mx.nd.zeros(4)
    made = {**found.arg_params, **found.aux_params}
    (wanted,), (got,) = forward(symbol, params, data=x), forward(found.symbol, made, data=x, softmax_label=label)
    assert sqnr(wanted, got) > 5


@pytest.mark.vnni
def test_a_product_that_int8_cannot_compute_is_left_out():
    """MobileNetV3's gates: ``quantized_elemwise_mul`` takes int8 only, and fails."""
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="gated_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), Gate(), nn.Conv2D(8, 3, padding=1), nn.GlobalAvgPool2D(), nn.Flatten())
    warmed(net, 4, 3, 12, 12)
    data = [mx.nd.random.normal(shape=(4, 3, 12, 12)) for _ in range(3)]
    found = mxmp.optimize_for_inference(net, data, dtypes=["int8"], max_drop=1, min_sqnr=10)
    rows = {row.name: row for row in found.report.candidates}
    assert not rows["int8"].verdict
    assert rows["int8"].sqnr > 15
    x = mx.nd.random.normal(shape=(4, 3, 12, 12))
    assert sqnr(net(x).asnumpy(), found(x).asnumpy()) > 15


class Gate(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        return F.elemwise_mul(x, F.clip(x + 3, 0, 6) / 6)


def test_a_converted_net_is_optimized_from_its_masters(net, images, held):
    mxmp.convert(net, "float16")
    try:
        found = mxmp.optimize_for_inference(net, batches(images), dtypes=())
    finally:
        mxmp.restore(net)
    assert sqnr(held[2], found(held[0]).asnumpy()) > 110


# -- what may go wrong ------------------------------------------------------------------------------


def test_a_crash_of_a_candidate_is_an_error_of_that_candidate():
    symbol = relu(conv(S.var("data"), "layer"), "relu")
    params = filled(symbol, data=(2, 3, 8, 8))
    with Runner([{"data": mx.nd.ones((2, 3, 8, 8))}]) as runner:
        runner.add("good", Graph.from_symbol(symbol), params)
        before = runner.ask("outputs", "good", [0])[0][0]
        runner._child.process.kill()
        with pytest.raises(CandidateError, match="ended with SIGKILL") as error:
            runner.ask("outputs", "good", [0])
        assert error.value.crashed
        np.testing.assert_array_equal(runner.ask("outputs", "good", [0])[0][0], before)


def test_a_folded_graph_that_fails_is_not_evaluated_in_this_process(net, images, monkeypatch):
    ask = Runner.ask

    def failing(self, what, *arguments):
        if (what, arguments[:1]) == ("outputs", (search.FOLDED,)):
            raise CandidateError("its process ended with SIGSEGV", crashed=True)
        return ask(self, what, *arguments)

    monkeypatch.setattr(Runner, "ask", failing)
    report = mxmp.optimize_for_inference(net, batches(images), dtypes=(), evaluate=lambda served: 1.0).report
    scores = {row.name: row.score for row in report.candidates}
    assert scores[search.PLAIN] == 1.0
    assert scores[search.FOLDED] is None


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
def test_ctrl_c_leaves_the_net_as_it_was(net, images, held, monkeypatch):
    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(search.PlanSearch, "_try_int8", interrupt)
    before = {name: param.data().asnumpy() for name, param in net.collect_params().items()}
    with pytest.raises(KeyboardInterrupt):
        mxmp.optimize_for_inference(net, batches(images))
    after = {name: param.data().asnumpy() for name, param in net.collect_params().items()}
    assert all((before[name] == after[name]).all() for name in before)
    np.testing.assert_array_equal(net(held[0]).asnumpy(), held[2])


def test_without_vnni_int8_is_left_out(net, images, monkeypatch):
    monkeypatch.setattr(cpu, "lacks", lambda *_: True)
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["int8"])
    assert any("no VNNI" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


def test_without_avx512_bfloat16_is_left_out(net, images, monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=["bfloat16"])
    assert any("bfloat16 was left out" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


class Gated(HybridBlock):
    """A layer, squeeze-and-excitation with a hard sigmoid, a global average, a dense layer."""

    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.layer, self.gate = nn.Conv2D(channels, 3, padding=1), nn.Conv2D(channels, 1)
            self.dense = nn.Dense(10)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.layer(x)
        gate = F.clip(self.gate(F.contrib.AdaptiveAvgPooling2D(x, output_size=1)) * 0.2 + 0.5, 0, 1)
        return self.dense(F.Pooling(F.broadcast_mul(x, gate), global_pool=True, pool_type="avg", kernel=(1, 1)))


@pytest.mark.parametrize("batches", [4, 12])
@pytest.mark.parametrize("known", [True, False], ids=["the fault is known", "it is not known"])
def test_a_kernel_that_fails_in_its_second_run_is_left_out_alone(monkeypatch, known, batches):
    """oneDNN's dense layer did, where MXNet stores its data otherwise than in the first run."""
    net = Gated(channels=8 if cpu.lacks("avx512f") else 16)  # one of oneDNN's blocks
    monkeypatch.setattr(cpu, "lacks", lambda *_: False)
    if not known:
        monkeypatch.setattr(quantizing, "store_by_rows", lambda graph: None)
    net.initialize(mx.init.Xavier())
    x = [mx.nd.random.normal(shape=(16, 3, 12, 12)) for _ in range(batches)]
    wanted = net(x[0]).asnumpy()
    found = mxmp.optimize_for_inference(net, x, dtypes="int8", progress=False, max_drop=1, min_sqnr=-99)
    rows = {row.name: row for row in found.report.candidates}
    assert {name: row.verdict for name, row in rows.items()} == dict.fromkeys(rows, "")
    assert {"float32, fused", "int8"} <= rows.keys()
    for _ in range(3):
        assert sqnr(wanted, found(x[0]).asnumpy()) > 0


def test_a_candidate_that_fails_when_it_is_timed_gets_that_verdict(net, images, monkeypatch):
    ask = Runner.ask

    def failing(self, what, *arguments):
        if what == "times" and "float32, fused" in arguments[0]:
            raise CandidateError("no second run")
        return ask(self, what, *arguments)

    monkeypatch.setattr(Runner, "ask", failing)
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=(), progress=False)
    verdicts = {row.name: row.verdict for row in found.report.candidates}
    assert verdicts["float32, fused"] == "fails here: no second run"
    assert not verdicts["float32"]


def test_a_network_whose_own_outputs_are_nan_is_refused():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.HybridLambda(lambda math, x: math.sqrt(-1 - x * x)))
    net.initialize()
    with pytest.raises(ValueError, match="own FP32 outputs on the calibration data hold NaN"):
        mxmp.optimize_for_inference(net, [mx.nd.ones((2, 2))])


def test_equal_infinities_are_no_noise():
    masked = np.array([1.0, -np.inf, 2.0])
    assert calibration.sqnr(masked, masked) == np.inf
    assert calibration.sqnr(masked, np.array([1.1, -np.inf, 2.0])) > 20
    assert calibration.sqnr(masked, np.array([1.0, 5.0, 2.0])) == -np.inf


def test_a_network_of_numpy_arrays_is_refused():
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = nn.Dense(3, in_units=2)
        net.initialize()
        x = mx.np.ones((2, 2))
        with pytest.raises(ValueError, match=r"this network is one of mx\.np"):
            mxmp.optimize_for_inference(net, [x])


@pytest.mark.vnni
def test_nothing_to_quantize_is_said():
    symbol = S.LayerNorm(S.var("data"), name="norm")
    params = filled(symbol, data=(4, 6))
    data = [mx.nd.random.normal(shape=(4, 6)) for _ in range(2)]
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params)
    assert any("nothing to quantize" in note for note in found.report.notes)
    assert found.report.chosen.startswith("float32")


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "there is no calibration data"),
        (mx.nd.ones((2, 1, 8, 8)), r"calibration is one NDArray: expected an iterable of batches"),
        ([mx.nd.ones((2, 3, 8, 8))], r"calibration batch 0 with shapes .*3, 8, 8.* does not fit the network"),
        ([mx.nd.ones((2, 1, 8, 8)), mx.nd.ones((2, 1, 8, 8)) * np.nan], "calibration batch 1, 'data', holds NaN"),
        ([(mx.nd.ones((2, 1, 8, 8)), mx.nd.ones(2))], "where it holds labels too, leave them out"),
        (["x"], "holds a str: expected arrays"),
        ([mx.nd.ones((2, 1, 8, 8)), (mx.nd.ones((2, 1, 8, 8)),) * 2], "calibration batch 1 has 2 arrays"),
    ],
)
def test_calibration_that_cannot_be_is_refused(net, calibration, message):
    with pytest.raises(ValueError, match=message):
        mxmp.optimize_for_inference(net, calibration)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([np.ones((4, 6)), np.ones(4)], r"batch 0 has 2 arrays, and the inputs are \['data'\]: give dicts"),
        ({"other": np.ones((4, 6))}, r"batch 0 has \['other'\]: the inputs are \['data'\]"),
    ],
)
def test_a_symbols_batch_that_does_not_fit_its_inputs_is_refused(batch, message):
    symbol = S.FullyConnected(S.var("data"), num_hidden=3, name="fc")
    with pytest.raises(ValueError, match=message):
        mxmp.optimize_for_inference(symbol, [batch] * 2, arg_params=filled(symbol, data=(4, 6)))


def test_a_batch_without_an_array_that_the_network_reads_is_refused():
    symbol = S.FullyConnected(S.var("left"), num_hidden=3, name="a") + S.FullyConnected(
        S.var("right"), num_hidden=3, name="b"
    )
    params = filled(symbol, left=(4, 6), right=(4, 2))
    with pytest.raises(ValueError, match=r"calibration batch 0 has no array for \['right'\]"):
        mxmp.optimize_for_inference(symbol, [{"left": np.ones((4, 6))}] * 2, arg_params=params)


@pytest.mark.parametrize("batch", [[np.ones((4, 6))], {"data": np.ones((4, 6))}], ids=["list", "dict"])
def test_a_parameter_of_no_layer_that_is_missing_is_named_and_not_zero(batch):
    symbol = S.broadcast_mul(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"), S.var("gain", shape=(1, 3)))
    symbol = S.SoftmaxOutput(symbol, S.var("label"), name="softmax")
    params = filled(symbol, data=(4, 6))
    args = {name: params[name] for name in ("fc_weight", "fc_bias")}
    with pytest.raises(ValueError, match=r"calibration batch 0 has no array for \['gain'\].* into arg_params"):
        mxmp.optimize_for_inference(symbol, [batch] * 2, dtypes=(), arg_params=args)
    args["gain"] = params["gain"]
    found = mxmp.optimize_for_inference(symbol, [batch] * 2, dtypes=(), arg_params=args)  # without a label
    (wanted,) = forward(symbol, {**args, "label": mx.nd.zeros(4)}, data=mx.nd.ones((4, 6)))
    (got,) = forward(found.symbol, {**found.arg_params, "label": mx.nd.zeros(4)}, data=mx.nd.ones((4, 6)))
    assert sqnr(wanted, got) > 100


class Branches(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Dense(4, in_units=6), nn.Dense(4, in_units=6), nn.Dense(3, in_units=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.last(F.contrib.cond(F.sum(x) > 0, lambda: self.first(x), lambda: self.second(x)))


def test_a_network_with_a_condition_takes_either_branch():
    """MXNet infers no shape behind a ``cond``, though it needs none."""
    net = Branches()
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


class OneOfThree(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, first, second, third):  # noqa: N803
        return self.dense(second)


def test_an_input_that_the_block_does_not_read_is_taken_and_ignored():
    net = OneOfThree()
    net.initialize()
    arrays = [mx.nd.random.normal(shape=(4, size)) for size in (2, 6, 3)]
    found = mxmp.optimize_for_inference(net, [arrays] * 2, dtypes=())
    assert sqnr(net(*arrays).asnumpy(), found(*arrays).asnumpy()) > 100
    assert sqnr(net(*arrays).asnumpy(), found(arrays[0], [arrays[1], arrays[2]]).asnumpy()) > 100
    with pytest.raises(ValueError, match="takes at least 2 arrays, got 1"):
        found(arrays[1])


class OfOneSize(gluon.HybridBlock):
    """MXNet lets the reshape of a smaller batch pass, and reads behind its end."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.dense(F.reshape(x, (8, 6)))


def test_a_single_batch_of_a_network_that_takes_one_size_calibrates_and_measures():
    net = OfOneSize()
    net.initialize()
    x = mx.nd.random.normal(shape=(8, 6))
    found = mxmp.optimize_for_inference(net, [x], dtypes=["bfloat16"])
    assert any("one batch both calibrated and measured" in note for note in found.report.notes)
    assert all(row.sqnr > 30 for row in found.report.candidates)
    with pytest.raises(
        ValueError, match=r"batch 1 with shapes .* does not fit the network: .* makes 48 elements of 24"
    ):
        mxmp.optimize_for_inference(net, [x, x[:4]], dtypes=())


@pytest.mark.parametrize("first", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("calibrator", calibration.CALIBRATORS)
def test_a_later_batch_of_far_larger_values_keeps_the_histogram_small(calibrator, first):
    """MXNet adds bins of the same width, to a tensor that was 0 throughout infinitely many."""
    statistics = calibration.Statistics()
    values = np.random.RandomState(0).uniform(-5, 5, 10_000).astype("float32")
    statistics.add("x", np.full(10_000, first, "float32"))
    statistics.add("x", values)
    counts, edges, low, high, end = statistics.histograms["x"]
    assert counts.sum() == 20_000
    assert len(counts) + 1 == len(edges) < 25_000
    assert (low, high) == (values.min(), values.max())
    assert end >= high
    least, most = statistics.ranges(calibrator)["x"]
    assert 4 < most <= high
    assert -4 > least >= low


def test_infinite_values_of_a_tensor_do_not_count():
    statistics = calibration.Statistics()
    statistics.add("mask", np.array([0, -np.inf], "float32"))
    statistics.add("mask", np.array([1, np.inf, np.nan], "float32"))
    statistics.add("all", np.array([np.inf], "float32"))
    assert statistics.ranges("min/max") == {"mask": (0.0, 1.0)}


@pytest.mark.vnni
def test_a_product_with_a_parameter_leaves_the_other_layers_in_int8():
    """MXNet's full mode would quantize the product, and fail. The shape of its parameter is that of the value alone."""
    layers = S.relu(S.FullyConnected(S.var("data"), num_hidden=16, name="first"))
    layers = S.FullyConnected(layers, num_hidden=16, name="second")
    params = {name: value for name, value in filled(layers, data=(32, 16)).items() if name != "data"}
    params["scale"] = mx.nd.full((1, 16), 2)
    data = [mx.nd.random.normal(shape=(32, 16)) for _ in range(2)]
    symbol = S.broadcast_mul(layers, S.var("scale"), name="product")
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params)
    (row,) = (row for row in found.report.candidates if row.name == "int8")
    assert 15 < row.sqnr < 100


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


def test_what_cannot_be_optimized_is_refused(net):
    x = mx.nd.ones((2, 1, 8, 8))
    with pytest.raises(TypeError, match="takes a gluon HybridBlock or a Symbol, got int"):
        mxmp.optimize_for_inference(3, [x])
    with pytest.raises(ValueError, match="runs as Python, which has no graph"):
        mxmp.optimize_for_inference(nn.Sequential(), [x])
    with pytest.raises(ValueError, match="has no values yet: initialize the net"):
        mxmp.optimize_for_inference(nn.Dense(3), [x])
    half = nn.Dense(3, in_units=2)
    half.initialize()
    half.cast("float16")
    with pytest.raises(ValueError, match="_weight' is float16: give the network in FP32"):
        mxmp.optimize_for_inference(half, [mx.nd.ones((2, 2))])
    with pytest.raises(ValueError, match="max_drop=-1"):
        mxmp.optimize_for_inference(net, [x], max_drop=-1)
    with pytest.raises(ValueError, match="pass arg_params= and aux_params="):
        mxmp.optimize_for_inference(S.BatchNorm(S.var("data")), [x])
    with pytest.raises(ValueError, match="arg_params and aux_params are for Symbols"):
        mxmp.optimize_for_inference(net, [x], arg_params={})
    with pytest.raises(ValueError, match="evaluate returned nan: expected a finite number"):
        mxmp.optimize_for_inference(net, [x], evaluate=lambda served: float("nan"))


@pytest.mark.parametrize("dtype", ["uint16", "complex64", "U1"])
def test_a_batch_of_a_dtype_that_mxnet_lacks_is_refused(net, dtype):
    with pytest.raises(ValueError, match=r"a calibration batch holds .*, which MXNet does not have"):
        mxmp.optimize_for_inference(net, [np.ones((2, 1, 8, 8)).astype(dtype)])


def test_the_report_is_data_and_a_picture(found, tmp_path):
    found.report.save(str(tmp_path / "report.json"))
    raw = json.loads((tmp_path / "report.json").read_text())
    assert raw["chosen"] == found.report.chosen
    assert len(raw["layers"]) == len(found.report.layers) > 0
    pytest.importorskip("matplotlib")
    found.report.plot(str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="is no picture"):
        found.report.plot("picture.txt")


def test_the_picture_has_infinity_above_all_and_names_in_a_legend():
    pytest.importorskip("matplotlib")
    found = {"float32": (1.3, math.inf), "float32, fused": (0.8, 137.0), "int8": (0.3, 25.0), "bfloat16": (None, None)}
    rows = [Candidate(name, time, sqnr=ratio) for name, (time, ratio) in found.items()]
    (axis,) = InferenceReport("int8", "float32, fused", rows, [], {}, []).plot().axes
    heights = {line.get_label(): line.get_ydata()[0] for line in axis.lines}
    assert heights["float32"] > heights["float32, fused"] == 137
    ticks = dict(zip(axis.get_yticks(), (text.get_text() for text in axis.get_yticklabels())))
    assert ticks[heights["float32"]] == "∞"
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["float32", "float32, fused", "int8"]
    assert not axis.texts


def test_the_report_names_what_is_fused_and_says_why_of_every_operator(found):
    fused = [layer for layer in found.report.layers if layer.fused]
    assert all(layer.op.startswith("_sg_mkldnn") and layer.name == layer.fused[-1] for layer in fused)
    assert all(layer.why for layer in found.report.layers)
    assert not any(line.endswith(": ") for line in str(found.report).splitlines())


def test_a_fused_convolution_is_named_by_its_own_name_first():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(8, 3, prefix="conv_"), nn.Activation("relu", prefix="relu_"))
    net.initialize()
    x = mx.nd.ones((2, 3, 8, 8))
    net(x)
    report = mxmp.optimize_for_inference(net, [x], dtypes=()).report
    (layer,) = (layer for layer in report.layers if layer.op == "_sg_mkldnn_conv")
    assert layer.fused == ("conv_fwd", "relu_fwd")
    assert layer.why == "the graph that is served is FP32"
    assert "float32   conv_fwd + relu_fwd: the graph that is served is FP32" in str(report)


@pytest.mark.parametrize("dtype", LOW)
def test_the_report_knows_operators_with_several_outputs(dtype, monkeypatch):
    ask = Runner.ask

    def with_times(self, what, *arguments):
        if what == "times":
            return {name: [1.0 if name == dtype else 2.0] * 4 for name in arguments[0]}
        return ask(self, what, *arguments)

    monkeypatch.setattr(Runner, "ask", with_times)
    parts = S.split(relu(conv(S.var("data"), "stem"), "relu"), num_outputs=2, axis=1, name="parts")
    symbol = S.concat(conv(parts[0], "left"), conv(parts[1], "right"), dim=1)
    params = filled(symbol, data=(4, 3, 8, 8))
    data = [mx.nd.random.normal(shape=(4, 3, 8, 8)) for _ in range(2)]
    found = mxmp.optimize_for_inference(symbol, data, arg_params=params, dtypes=dtype, min_sqnr=0)
    assert found.report.chosen == dtype
    layers = {layer.name: layer for layer in found.report.layers}
    assert all(layer.milliseconds is not None for layer in layers.values())
    assert layers["parts" if dtype == "bfloat16" else "data_quantize"].dtype == dtype


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
