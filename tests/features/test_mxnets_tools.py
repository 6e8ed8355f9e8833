"""What MXNet offers for a net, a Symbol or a Module works on ours too, or is refused at once in words."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.contrib import quantization
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import CheckpointHandler, EarlyStoppingHandler, Estimator

import mxmp

pytestmark = pytest.mark.slow

SHAPE = (4, 3, 8, 8)


def fresh() -> gluon.HybridBlock:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"))
        net.add(nn.Dense(5, in_units=8 * 64))
    net.initialize()
    return net


def images() -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(0).normal(size=SHAPE))


def iterator(label: str | None = "softmax_label") -> mx.io.DataIter:
    labels = None if label is None else np.zeros(8, "float32")
    return mx.io.NDArrayIter(np.ones((8, *SHAPE[1:]), "float32"), labels, SHAPE[0], label_name=label or "label")


def loader(*more: np.ndarray) -> gluon.data.DataLoader:
    rows = np.random.RandomState(1).normal(size=(8, *SHAPE[1:])).astype("float32")
    return gluon.data.DataLoader(gluon.data.ArrayDataset(rows, *more), SHAPE[0])


@pytest.fixture(scope="module")
def served() -> gluon.HybridBlock:
    net = fresh()
    data = [images() * scale for scale in (1, 2, 3)]
    return mxmp.optimize_for_inference(net, data, dtypes=(), progress=False)


@pytest.fixture(params=["float16", "bfloat16", "tuned", "optimized"])
def net(request, served):
    if request.param == "optimized":
        return served
    found = fresh()
    how = mxmp.tune(found, images(), measure=False) if request.param == "tuned" else request.param
    mxmp.convert(found, how)
    found(images())
    return found


@pytest.fixture(params=["float16", "bfloat16", "optimized"])
def model(request, served):
    """A Symbol, its parameters and its auxiliary states."""
    if request.param == "optimized":
        return served.symbol, served.arg_params, served.aux_params
    plain = fresh()
    symbol = mx.sym.SoftmaxOutput(plain(mx.sym.var("data")), name="softmax")
    values = {name: param.data() for name, param in plain.collect_params().items()}
    states = {name: value for name, value in values.items() if "running" in name}
    arguments = {name: value for name, value in values.items() if name not in states}
    return mxmp.cast_symbol(symbol, request.param), arguments, states


def is_served(net) -> bool:
    return hasattr(net, "report")


def partitioned(net, folder):
    net.optimize_for(images(), backend="MKLDNN")


def cast(net, folder):
    net.cast("float16")
    net(images())


def quantized(net, folder):
    made = quantization.quantize_net(
        net, "auto", calib_data=iterator(None), calib_mode="naive", ctx=mx.cpu(), logger=None
    )
    assert np.isfinite(made(images()).asnumpy()).all()


def profiled(net, folder):
    mx.profiler.set_config(profile_symbolic=True, aggregate_stats=True, filename=str(folder / "profile.json"))
    mx.profiler.set_state("run")
    net(images()).wait_to_read()
    mx.profiler.set_state("stop")
    assert "conv" in mx.profiler.dumps(reset=True).lower()


def hooked(net, folder):
    names = []
    net.register_op_hook(lambda name, op, array: names.append(name))
    net(images()).wait_to_read()
    assert names


def summarized(net, folder):
    net.summary(images())


def exported(net, folder):
    net.export(str(folder / "net"))
    module = mx.mod.Module.load(str(folder / "net"), 0, label_names=None)
    module.bind([("data", SHAPE)], for_training=False)
    module.forward(mx.io.DataBatch([images()]), is_train=False)
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), net(images()).asnumpy(), rtol=0.1, atol=0.05)


def estimated(net, folder):
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    estimator = Estimator(
        net,
        gluon.loss.SoftmaxCrossEntropyLoss(),
        train_metrics=mx.metric.Accuracy(),
        trainer=trainer,
        batch_processor=mxmp.BatchProcessor(),
    )
    handlers = [CheckpointHandler(str(folder)), EarlyStoppingHandler(estimator.train_metrics[0])]
    labelled = loader(np.zeros(8, "float32"))
    estimator.fit(labelled, val_data=labelled, epochs=1, event_handlers=handlers)


# From what is done with a net to how it is refused: for a converted net, for a served one; None where it works.
NETS = {
    partitioned: ("optimize_for.* partitions the FP32 graph", None),
    cast: ("'float16'|is stored in float16", r"cast\('float16'\) would break its graph"),
    quantized: (None, None),
    profiled: (None, None),
    hooked: (None, None),
    summarized: (None, "must not be hybridized to print summary"),
    exported: (None, None),
    estimated: (None, "nothing of it asks for a gradient"),
}


@pytest.mark.parametrize("tool", NETS, ids=lambda tool: tool.__name__)
@pytest.mark.filterwarnings("ignore")  # of MXNet's own tools
def test_a_tool_for_nets_works_or_says_why_not_at_once(tool, net, tmp_path):
    message = NETS[tool][is_served(net)]
    before = net(images()).asnumpy()
    if message is None:
        tool(net, tmp_path)
    else:
        with pytest.raises((ValueError, RuntimeError, AssertionError), match=message):
            tool(net, tmp_path)
    if tool not in (estimated, cast) or is_served(net):
        np.testing.assert_allclose(net(images()).asnumpy(), before, rtol=1e-4, atol=1e-5)


def test_a_restored_net_is_partitioned_again():
    net = fresh()
    mxmp.convert(net, "bfloat16")
    mxmp.restore(net)
    net.optimize_for(images(), backend="MKLDNN")
    assert net(images()).shape == (4, 5)


def printed(symbol, arguments, states, folder):
    mx.viz.print_summary(symbol)


def plotted(symbol, arguments, states, folder):
    pytest.importorskip("graphviz")
    mx.viz.plot_network(symbol, shape={"data": SHAPE})


def partitioned_symbol(symbol, arguments, states, folder):
    made = symbol.optimize_for("MKLDNN", arguments, states)
    executor = made.simple_bind(mx.cpu(), grad_req="null", data=SHAPE)
    executor.copy_params_from(arguments, states, allow_extra_params=True)
    assert np.isfinite(executor.forward(data=images())[0].asnumpy()).all()


def quantized_without_data(symbol, arguments, states, folder):
    quantization.quantize_model(symbol, arguments, states, ctx=mx.cpu(), calib_mode="none", logger=None)


def checkpointed(symbol, arguments, states, folder):
    """MXNet takes amp_cast out of what it saves: what is left is the graph in FP32, or the served one."""
    mx.model.save_checkpoint(str(folder / "net"), 1, symbol, arguments, states)
    again, args, auxs = mx.model.load_checkpoint(str(folder / "net"), 1)
    assert (again.list_outputs(), set(args), set(auxs)) == (symbol.list_outputs(), set(arguments), set(states))


def trained_by_svrg(symbol, arguments, states, folder):
    if "softmax_label" in symbol.list_arguments():  # a served graph has no loss
        SVRGModule(symbol, update_freq=2).fit(iterator(), num_epoch=1, optimizer="sgd")


SYMBOLS = [printed, plotted, partitioned_symbol, quantized_without_data, checkpointed, trained_by_svrg]


@pytest.mark.parametrize("tool", SYMBOLS, ids=lambda tool: tool.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_tool_for_symbols_works(tool, model, tmp_path):
    tool(*model, tmp_path)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_summary_with_shapes_needs_the_fp32_symbol(policy, capsys):
    """MXNet's print_summary fails for each operator of a bias, in FP32 too; symbolic.md says what to print."""
    symbol = fresh()(mx.sym.var("data"))
    mx.viz.print_summary(symbol, shape={"data": SHAPE})
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc", bias=mx.sym.var("fc_bias") * 1.0)
    for failing in (layer, mxmp.cast_symbol(symbol, policy)):
        with pytest.raises(IndexError):
            mx.viz.print_summary(failing, shape={"data": SHAPE})


def test_modules_take_a_monitor_and_stand_in_a_sequence():
    first = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="first")
    second = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="second"), name="softmax"
    )
    for make in (
        lambda symbol, **options: mxmp.Module(symbol, policy="bfloat16", **options),
        lambda symbol, **options: mx.mod.Module(mxmp.cast_symbol(symbol, "bfloat16"), **options),
    ):
        chain = mx.mod.SequentialModule()
        chain.add(make(first, label_names=None)).add(make(second), take_labels=True, auto_wiring=True)
        chain.fit(iterator(), num_epoch=1, monitor=mx.mon.Monitor(1))


@pytest.mark.filterwarnings("ignore")
def test_onnx_takes_the_export_of_a_converted_net_and_not_a_served_graph(served, tmp_path):
    """inference.md says what to export instead."""
    pytest.importorskip("onnx", reason="the dev extra has it")
    if not hasattr(mx, "onnx"):
        pytest.skip("MXNet has mx.onnx since 1.9.0")
    net = fresh()
    mxmp.convert(net, "bfloat16")
    net(images())
    for block, message in ((net, None), (served, "_sg_mkldnn_conv")):
        block.export(str(tmp_path / "net"))
        files = str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0000.params")
        if message is None:
            mx.onnx.export_model(*files, [SHAPE], np.float32, str(tmp_path / "net.onnx"))
        else:
            with pytest.raises(AttributeError, match=message):
                mx.onnx.export_model(*files, [SHAPE], np.float32, str(tmp_path / "served.onnx"))
