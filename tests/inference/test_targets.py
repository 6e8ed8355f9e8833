"""What is optimized: nets and Symbols, their inputs and batches, and what is returned."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from kit.blocks import Lambda
from kit.oracle import sqnr
from kit.served_networks import LOW, S, batches, filled, forward, preactivation
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.inference.targets import OptimizedSymbol
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow


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


class Taken(gluon.HybridBlock):
    """Columns of its input, by a constant of indices."""

    def __init__(self, dtype):
        super().__init__()
        with self.name_scope():
            self.columns = self.params.get_constant("columns", mx.nd.array([2, 0, 1, 1], dtype=dtype))
            self.last = nn.Dense(3)

    def hybrid_forward(self, F, x, columns):  # noqa: N803
        return self.last(F.take(x, columns, axis=1))


@pytest.mark.parametrize("dtypes", [(), *LOW, "float16"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8"])
def test_a_constant_of_integers_stays_one(dtype, dtypes):
    net = Taken(dtype)
    net.initialize()
    data = [mx.nd.random.normal(shape=(8, 3)) for _ in range(3)]
    expected = net(data[0]).asnumpy()
    found = mxmp.optimize_for_inference(net, data, dtypes=dtypes, evaluate=lambda served: 1.0)
    assert not [each for each in found.report.candidates if each.verdict]
    assert found.arg_params[net.columns.name].dtype == np.dtype(dtype)
    if dtypes != "float16":  # its kernels are a GPU's
        assert sqnr(expected, found(data[0]).asnumpy()) > 20


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


def test_a_converted_net_is_optimized_from_its_masters(net, images, held):
    mxmp.convert(net, "float16")
    try:
        found = mxmp.optimize_for_inference(net, batches(images), dtypes=())
    finally:
        mxmp.restore(net)
    assert sqnr(held[2], found(held[0]).asnumpy()) > 110


def test_a_network_of_numpy_arrays_is_refused():
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = nn.Dense(3, in_units=2)
        net.initialize()
        x = mx.np.ones((2, 2))
        with pytest.raises(ValueError, match=r"this network is one of mx\.np"):
            mxmp.optimize_for_inference(net, [x])


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


def test_an_input_that_the_block_does_not_read_is_taken_and_ignored():
    net = Lambda(lambda f, net, first, second, third: net.dense(second), dense=nn.Dense(3, in_units=6))
    net.initialize()
    arrays = [mx.nd.random.normal(shape=(4, size)) for size in (2, 6, 3)]
    found = mxmp.optimize_for_inference(net, [arrays] * 2, dtypes=())
    assert sqnr(net(*arrays).asnumpy(), found(*arrays).asnumpy()) > 100
    assert sqnr(net(*arrays).asnumpy(), found(arrays[0], [arrays[1], arrays[2]]).asnumpy()) > 100
    with pytest.raises(ValueError, match="takes at least 2 arrays, got 1"):
        found(arrays[1])


def test_a_single_batch_of_a_network_that_takes_one_size_calibrates_and_measures():
    """MXNet lets the reshape of a smaller batch pass, and reads behind its end."""
    net = Lambda(lambda f, net, x: net.dense(f.reshape(x, (8, 6))), dense=nn.Dense(3, in_units=6))
    net.initialize()
    x = mx.nd.random.normal(shape=(8, 6))
    found = mxmp.optimize_for_inference(net, [x], dtypes=["bfloat16"])
    assert any("one batch both calibrated and measured" in note for note in found.report.notes)
    assert all(row.sqnr > 30 for row in found.report.candidates)
    with pytest.raises(
        ValueError, match=r"batch 1 with shapes .* does not fit the network: .* makes 48 elements of 24"
    ):
        mxmp.optimize_for_inference(net, [x, x[:4]], dtypes=())


def test_what_cannot_be_optimized_is_refused(net):
    x = mx.nd.ones((2, 1, 8, 8))
    with pytest.raises(TypeError, match="takes a gluon Block or Symbol, got int"):
        mxmp.optimize_for_inference(3, [x])
    with pytest.raises(ValueError, match="runs as Python, which has no graph"):
        mxmp.optimize_for_inference(nn.Sequential(), [x])
    with pytest.raises(ValueError, match="has no values yet: initialize the net"):
        mxmp.optimize_for_inference(nn.Dense(3), [x])
    half = nn.Dense(3, in_units=2)
    half.initialize()
    half.cast("float16")
    with pytest.raises(ValueError, match=r"' is float16: give the network in FP32, as net.cast\('float32'\) makes"):
        mxmp.optimize_for_inference(half, [mx.nd.ones((2, 2))])
    half.cast("float32")
    assert len(mxmp.optimize_for_inference(half, [mx.nd.ones((2, 2))], dtypes=())(mx.nd.ones((2, 2))))
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
