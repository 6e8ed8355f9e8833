"""The versions of MXNet: what is refused and what is warned of at import."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.host import versions
from mxmp.precision.graph import Graph


@pytest.mark.parametrize("version", ["1.6.0", "1.5.1.post0", "0.12.1", "2.0.0b1", "2.0.0", "unknown"])
def test_a_version_that_lacks_what_mxmp_needs_is_refused_in_words(version):
    with pytest.raises(ImportError, match=rf"1\.7\.0, 1\.8\.0, 1\.9\.0 or 1\.9\.1, and this is MXNet {version} .*pip"):
        versions.find(version)


@pytest.mark.parametrize("version", ["1.9.2", "1.10.0", "1.8.1b20210101"])
def test_a_version_that_was_not_tried_is_warned_of_and_runs_as_the_newest(version):
    with pytest.warns(UserWarning, match=rf"not on MXNet {version}, which it takes for 1\.9\.1"):
        assert versions.find(version)[1] == versions.find("1.9.1")[1]


@pytest.mark.parametrize("version", ["1.7.0", "1.8.0", "1.9.0", "1.9.1", "1.8.0.post0"])
def test_the_versions_that_were_tried_are_neither(version, recwarn):
    assert versions.find(version)[0] == tuple(map(int, version.split(".")[:3]))
    assert list(recwarn) == []


@pytest.mark.slow
def test_an_import_with_another_version_ends_in_these_words():
    code = "import mxnet; mxnet.__version__ = '1.6.0'; import mxmp"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: mxmp runs on Apache MXNet 1.7.0, 1.8.0, 1.9.0 or 1.9.1" in run.stderr


def test_a_graph_has_the_number_of_the_version_that_runs():
    """As MXNet itself writes it; a newer number makes it warn of each file that it loads."""
    made = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
    attributes = json.loads(made.tojson())["attrs"]
    assert {name: attributes[name] for name in versions.GRAPH_ATTRIBUTES} == versions.GRAPH_ATTRIBUTES
    assert Graph.from_symbol(made).attrs == attributes
    assert re.match(r"\d+\.\d+\.\d+", mx.__version__)[0] == ".".join(map(str, versions.NUMBERS))


# -- files ------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import mxnet as mx, numpy as np, mxmp
from mxnet import autograd, gluon

task, policy = sys.argv[1:]
drawn = np.random.RandomState(0)
x, y = mx.nd.array(drawn.randn(8, 3, 6, 6)), mx.nd.arange(8) % 4
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Conv2D(8, 3, in_channels=3), gluon.nn.BatchNorm(in_channels=8), gluon.nn.Activation("relu"))
    net.add(gluon.nn.Dense(4, in_units=128))
net.initialize()
for param in net.collect_params().values():
    param.set_data(mx.nd.array(np.abs(0.1 * drawn.randn(*param.shape))))

data = mx.sym.var("data")
symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.flatten(data), num_hidden=4, name="fc"), name="softmax")
shapes = {"data_shapes": [("data", x.shape)], "label_shapes": [("softmax_label", y.shape)]}
settings = {"learning_rate": 0.1, "momentum": 0.9}

if task == "read":
    plan = mxmp.Plan.load("plan.json")
    mxmp.convert(net, plan)
else:
    mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", settings, loss_scale=mxmp.DynamicLossScaler(init_scale=64.0))
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
if task == "read":
    mxmp.load_checkpoint("gluon", net, trainer)
    module = mxmp.Module.load("module", 1, load_optimizer_states=True, policy=policy)
else:
    module = mxmp.Module(symbol, policy=policy)
module.bind(**shapes)
if task == "write":
    module.init_params(mx.init.Constant(0.01))
module.init_optimizer(optimizer="sgd", optimizer_params=settings)


def train(steps):
    for _ in range(steps):
        with autograd.record():
            loss = loss_of(net(x), y)
        trainer.backward(loss)
        trainer.step(8)
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()


if task == "write":
    train(3)
    mxmp.explain(net).graphs[0].plan.save("plan.json")
    mxmp.save_checkpoint("gluon", net, trainer)
    net.export("exported")
    module.save_checkpoint("module", 1, save_optimizer_states=True)
else:
    served = gluon.SymbolBlock.imports("exported-symbol.json", ["data"], "exported-0000.params")
    np.save("served.npy", served(x).asnumpy())
train(2)
found = {name: param.data().astype("float32").asnumpy() for name, param in net.collect_params().items()}
found.update({name: array.asnumpy() for name, array in module.get_params()[0].items()})
np.savez(task + ".npz", scale=trainer.loss_scale, **found)
"""
OTHERS = [version for version in ("1.7.0", "1.8.0", "1.9.0") if version != mx.__version__]


def python_of(version: str) -> str:
    """The Python of an environment that ``scripts/test.sh --mxnet`` has made; the test skips where there is none."""
    if version == mx.__version__:
        return sys.executable
    home = Path.home() / ".cache" / "mxmp-versions" / version
    if not any(home.glob(".mxmp-*")):  # written when all is installed
        pytest.skip(f"bash scripts/test.sh --mxnet {version} makes the environment; it is not here")
    return str(home / "bin" / "python")


def run_under(version: str, folder: Path, *call: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(mxmp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [python_of(version), "-W", "ignore", "-c", *call]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float16", "params=float16", "bfloat16"])
@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("back", [False, True], ids=["written here", "read here"])
def test_a_run_of_one_version_continues_under_another_to_the_same_numbers(version, policy, back, tmp_path):
    """Checkpoint, trainer and module states, plan; an exported net is served."""
    pair = [mx.__version__, version]
    for task, each in zip(("write", "read"), reversed(pair) if back else pair):
        run_under(each, tmp_path, PROGRAM, task, policy)
    written, read = (np.load(tmp_path / f"{task}.npz") for task in ("write", "read"))
    assert sorted(read.files) == sorted(written.files)
    for name in written.files:
        np.testing.assert_allclose(read[name], written[name], rtol=1e-3, atol=1e-4, err_msg=name)


# -- bits -------------------------------------------------------------------------------------------

TRAINING = """
import sys
from itertools import product
import mxnet as mx, numpy as np, mxmp
from mxnet import autograd, gluon

drawn = np.random.RandomState(0)
x, y = mx.nd.array(drawn.randn(8, 3, 6, 6)), mx.nd.arange(8) % 4
settings = {"sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}, "adam": {"learning_rate": 0.01}}


def network(kind):
    data = mx.sym.var("data")
    if kind == "convolutions":
        data = mx.sym.Convolution(data, kernel=(3, 3), num_filter=8, name="conv")
        data = mx.sym.relu(mx.sym.BatchNorm(data, fix_gamma=False, name="norm"))
        data = mx.sym.Pooling(data, kernel=(2, 2), stride=(2, 2), pool_type="max")
    data = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=16, name="hidden"), act_type="tanh")
    symbol = mx.sym.FullyConnected(data, num_hidden=4, name="out")
    shapes, _, aux = symbol.infer_shape(data=x.shape)
    values = np.random.RandomState(1)
    named = [(name, shape) for name, shape in zip(symbol.list_arguments(), shapes) if name != "data"]
    args = {name: mx.nd.array(np.abs(0.1 * values.randn(*shape))) for name, shape in named}
    return symbol, args, {name: mx.nd.ones(shape) for name, shape in zip(symbol.list_auxiliary_states(), aux)}


def by_gluon(kind, optimizer, policy):
    symbol, args, aux = network(kind)
    net = gluon.SymbolBlock(symbol, [mx.sym.var("data")])
    params = net.collect_params()
    for name, value in {**args, **aux}.items():
        params[name].shape = value.shape
    net.initialize()
    for name, value in {**args, **aux}.items():
        params[name].set_data(value)
    net.hybridize()
    if policy:
        mxmp.convert(net, policy)
    trainer = (mxmp if policy else gluon).Trainer(params, optimizer, settings[optimizer])
    for _ in range(5):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
        trainer.backward(loss) if policy else loss.backward()
        trainer.step(8)
    return {name: param.data().asnumpy() for name, param in params.items()}


def by_module(kind, optimizer, policy):
    symbol, args, aux = network(kind)
    symbol = mx.sym.SoftmaxOutput(symbol, name="softmax")
    module = mxmp.Module(symbol, policy=policy) if policy else mx.mod.Module(symbol)
    module.bind(data_shapes=[("data", x.shape)], label_shapes=[("softmax_label", y.shape)])
    module.init_params(arg_params=args, aux_params=aux)
    module.init_optimizer(optimizer=optimizer, optimizer_params=settings[optimizer])
    for _ in range(5):
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()
    mx.nd.waitall()  # a plain Module's running statistics may be read before the backward has written them
    return {name: array.asnumpy() for each in module.get_params() for name, array in each.items()}


found = {}
for kind, run, optimizer, policy in product(("dense", "convolutions"), (by_gluon, by_module), settings, sys.argv[1:]):
    for name, array in run(kind, optimizer, policy).items():
        found["/".join([kind, run.__name__, optimizer, policy, name])] = array
np.savez("trained.npz", **found)
"""
POLICIES = ("float16", "params=float16", "bfloat16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: what networks have learned under a version, run once, by "network/frontend/optimizer/policy/name"."""

    @functools.lru_cache(maxsize=None)
    def run(version: str) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp("trained")
        run_under(version, folder, TRAINING, "", *POLICIES)
        with np.load(folder / "trained.npz") as found:
            return dict(found)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("frontend", ["by_gluon", "by_module"])
@pytest.mark.parametrize("kind", ["dense", "convolutions"])
@pytest.mark.parametrize("version", OTHERS)
def test_training_has_the_bits_of_another_version_where_plain_mxnet_has_them(
    version, kind, frontend, optimizer, policy, trained
):
    def learned(version: str, policy: str) -> dict[str, np.ndarray]:
        start = "/".join([kind, frontend, optimizer, policy, ""])
        return {name: array for name, array in trained(version).items() if name.startswith(start)}

    assert learned(version, policy).keys() == learned(mx.__version__, policy).keys() != set()
    here, there = learned(mx.__version__, ""), learned(version, "")
    if not all(np.array_equal(here[name], there[name]) for name in here):
        for name, array in learned(mx.__version__, policy).items():
            np.testing.assert_allclose(learned(version, policy)[name], array, atol=1e-3, err_msg=name)
        pytest.skip(f"plain MXNet {version} trains this network to other bits; within 1e-3 it is the same here")
    for name, array in learned(mx.__version__, policy).items():
        np.testing.assert_array_equal(learned(version, policy)[name], array, err_msg=name)
