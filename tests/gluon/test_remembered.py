"""What a trace leaves behind: attributes, children and hooks are as those of FP32 nets that are not hybridized."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, Takes, X, assert_alike, pair
from kit.twins import FLAGS, array, seeded, step, trainer_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.hook import hook_of

pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


def left(block, op, x):
    block.aux = op.mean(op.square(x))
    return x * 2


def as_numpy(value):
    if isinstance(value, mx.nd.NDArray):
        return value.asnumpy()
    if isinstance(value, dict):
        return {name: as_numpy(each) for name, each in value.items()}
    return [as_numpy(each) for each in value] if isinstance(value, (list, tuple)) else value


def assert_nearly(found, wanted):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            assert_nearly(one, other)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(found, wanted, rtol=0.03, atol=0.02)
    else:
        assert found == wanted


def step_of_each(block, op, x):
    def body(row, state):
        block.aux = row * 2
        return block.aux, state + row

    return op.contrib.foreach(body, x, op.zeros_like(op.sum(x, axis=0)))[0]


def step_while(block, op, x):
    def body(i, total):
        block.aux = total + 1
        return [], (i + 1, block.aux)

    start = op.zeros_like(op.sum(x).reshape((1,)))
    found = op.contrib.while_loop(lambda i, total: i < 3, body, (start, start + 1), max_iterations=4)
    return op.broadcast_mul(x, found[1][1].reshape((1, 1)))


def step_if(block, op, x):
    def then():
        block.aux = x * 2
        return block.aux + 1

    return op.contrib.cond(op.sum(x * x) > 0, then, lambda: x)


LOOPS = {"foreach": step_of_each, "while_loop": step_while, "cond": step_if}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LOOPS)
def test_what_the_body_of_a_loop_leaves_in_an_attribute_is_no_output_and_warned_of(kind, dtype):
    nets, inner = pair(lambda: Takes(LOOPS[kind], aux=0), dtype, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for training in (False, True):
            assert_alike(nets, training)
    if isinstance(inner[1].aux, int):
        assert inner[1].aux == 0
        assert "Return it as a state or an output" in str(caught[-1].message)
    else:  # a graph of the values outside, as for ``cond``
        assert_nearly(as_numpy(inner[1].aux), as_numpy(inner[0].aux))


class Unrolled(gluon.HybridBlock):
    """MXNet's cells that keep a mask or an output of the round before, in a loop of the graph."""

    def __init__(self, cell):
        super().__init__()
        with self.name_scope():
            self.cell = cell(gluon.rnn.RNNCell(3, input_size=3))
            self.head = nn.Dense(2, in_units=3, flatten=False)

    def hybrid_forward(self, op, x):
        self.cell.reset()
        return self.head(op.contrib.foreach(self.cell, op.expand_dims(x, 1), [op.zeros((1, 3))])[0])


CELLS = {
    "variational": lambda cell: gluon.contrib.rnn.VariationalDropoutCell(cell, drop_inputs=0.5, drop_states=0.5),
    "zoneout": lambda cell: gluon.rnn.ZoneoutCell(cell, zoneout_outputs=0.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CELLS)
def test_cells_that_keep_a_mask_run_in_a_loop_of_the_graph(kind, dtype):
    nets, _ = pair(lambda: Unrolled(CELLS[kind]), dtype, False)
    assert_alike(nets)
    with autograd.record():
        loss = nets[1](X).sum()
    loss.backward()
    assert all(np.isfinite(param.grad().asnumpy()).all() for param in nets[1].collect_params().values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("around", [False, True])
def test_cells_that_keep_a_mask_are_called_step_by_step(around, kind, dtype):
    """Each step reads what the one before has kept, an array, which no graph of Symbols takes."""

    def made():
        cell = CELLS[kind](gluon.rnn.LSTMCell(3, input_size=3))
        if not around:
            return cell
        cells = gluon.rnn.HybridSequentialRNNCell()
        cells.add(cell)
        return cells

    nets, outputs = [seeded(made()) for _ in range(2)], []
    mxmp.convert(nets[1], dtype)
    for net in nets:
        net.reset()
        mx.random.seed(1)
        with autograd.record():
            outputs.append(net.unroll(4, array(1, 2, 4, 3), merge_outputs=True)[0].asnumpy())
    np.testing.assert_allclose(*outputs, atol=0.01)
    assert mxmp.explain(nets[1]).nodes


def test_a_hook_within_a_loop_of_the_graph_is_refused():
    net = Unrolled(lambda cell: cell)
    net.initialize()
    net.cell.register_forward_hook(lambda *given: None)
    mxmp.convert(net, "float16")
    with pytest.raises(ValueError, match=r"take off the forward hook of .* within F.contrib.foreach"):
        net(X)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
def test_a_loss_with_what_an_attribute_has_trains_as_in_fp32(nested, dtype):
    nets, inner = pair(lambda: Takes(left, aux=0), dtype, nested)
    moved = []
    for net, block in zip(nets, inner):
        before = block.dense.weight.data().asnumpy()
        trainer = trainer_of(dtype if hook_of(net) else None, net, scale=64, learning_rate=0.1)
        for _ in range(5):
            with autograd.record():
                loss = net(X).square().mean() + 3 * block.aux
            step(trainer, loss, 1)
        moved.append(block.dense.weight.data().asnumpy() - before)
    np.testing.assert_allclose(*moved, rtol=0.05, atol=0.01)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
def test_exports_and_tools_have_the_outputs_alone(tmp_path):
    nets, _ = pair(lambda: Takes(left, aux=None), "float16")
    out = nets[1](X)
    nets[1].export(str(tmp_path / "net"))
    served = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    np.testing.assert_allclose(served(X).asnumpy(), out.asnumpy(), rtol=0.01, atol=1e-3)
    assert "mean" in [node.op for node in mxmp.explain(nets[1]).nodes]
    assert isinstance(mxmp.optimize_for_inference(mxmp.restore(nets[1]), [X], dtypes=())(X), mx.nd.NDArray)
    plan = mxmp.tune(nets[1], X, policy="float16", measure=False)
    assert isinstance(mxmp.convert(nets[1], plan)(X), mx.nd.NDArray)
    assert isinstance(copy.deepcopy(nets[1])(X), mx.nd.NDArray)


GLOBAL, FEATURES, LATEST = SimpleNamespace(), deque(maxlen=3), None


def keep_as_global(block, op, x):
    global LATEST
    LATEST = x


KEEPS = {
    "kept": lambda b, op, x: b.kept.append(x),
    "table": lambda b, op, x: b.table.update(a=x),
    "config": lambda b, op, x: setattr(b.config, "feature", x),
    "named": lambda b, op, x: setattr(b.named, "feature", x),
    "of": lambda b, op, x: b.of["config"].inner.append({"feature": [x]}),
    "GLOBAL": lambda b, op, x: setattr(GLOBAL, "feature", x),
    "FEATURES": lambda b, op, x: FEATURES.append(x * 2),
    "LATEST": keep_as_global,
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_result_in_what_was_there_before_is_refused_in_words(name):
    def compute(block, op, x):
        KEEPS[name](block, op, x)
        return x

    inside = {"kept": [], "table": {}, "config": SimpleNamespace(), "of": {"config": SimpleNamespace(inner=[])}}
    inside["named"] = type("Named", (dict,), {})()
    net = pair(lambda: Takes(compute, **inside), "float16")[0][1]
    with pytest.raises(
        ValueError, match=rf"puts a result into '{name}'.*self\.aux = \.\.\., or return it as an output"
    ):
        net(X)
    assert (net.kept, net.table) == ([], {})


def test_code_that_fails_leaves_attributes_as_they_were():
    def fails(block, op, x):
        block.aux = x
        raise RuntimeError("no")

    for nested in (False, True):
        nets, inner = pair(lambda: Takes(fails, aux=7), "float16", nested)
        with pytest.raises(ValueError, match="no"):
            nets[1](X)
        assert inner[1].aux == 7


# -- blocks inside ----------------------------------------------------------------------------------


def net_of_layers():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=3), nn.HybridSequential())
    net[1].add(nn.Dense(3, in_units=3, activation="tanh"))
    return net


def initialized(block):
    block.initialize(mx.init.One())
    return block


GROWTH = {
    "a layer more": lambda net: net[1].add(initialized(nn.Dense(3, in_units=3))),
    "a layer less": lambda net: net[1]._children.popitem(),
    "another layer": lambda net: net[1]._children.update({"0": initialized(nn.Dense(3, in_units=3))}),
    "another activation": lambda net: setattr(net[0], "act", nn.Activation("sigmoid")),
    "another weight": lambda net: net[0]._reg_params.update(weight=net[1][0].weight),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GROWTH)
def test_a_child_may_change_after_the_first_call(kind, dtype):
    nets, _ = pair(net_of_layers, dtype)
    for training in (False, True):
        assert_alike(nets, training)
    for net in nets:
        GROWTH[kind](net)
    for training in (False, True, False):
        assert_alike(nets, training)
    assert all(hook_of(block) for block in [nets[1][0], nets[1][1], *nets[1][1]])
    mxmp.restore(nets[1])
    assert not any(hook_of(block) for block in [nets[1][0], nets[1][1], *nets[1][1]])
    assert_alike(nets)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
def test_hooks_of_children_get_the_arrays_of_each_call(flags, late):
    nets, _ = pair(net_of_layers, "float16")
    if FLAGS[flags] is not None:
        nets[1].hybridize(**FLAGS[flags])
    found = [[], []]
    if late:
        assert_alike(nets)
    handles = []
    for net, kept in zip(nets, found):
        for block in (net[0], net[1], net[1][0]):
            handles.append(block.register_forward_pre_hook(lambda b, args, kept=kept: kept.append(as_numpy(args))))
            handles.append(block.register_forward_hook(lambda b, i, o, kept=kept: kept.append(as_numpy([*i, o]))))
    for training in (False, True, False):
        assert_alike(nets, training)
    assert len(found[0]) == len(found[1]) == 18
    assert sorted(map(len, found[0])) == sorted(map(len, found[1]))
    by_size = [sorted(each, key=lambda got: (len(got), float(np.sum(got[0])))) for each in found]
    assert_nearly(by_size[1], by_size[0])
    for handle in handles:
        handle.detach()
    assert_alike(nets)
    assert len(found[1]) == 18


ACTS = {nn.Dense: "tanh", nn.BatchNorm: "sigmoid"}
BY_TYPE = {
    "equal": lambda layer, op, x: op.tanh(x) if type(layer) == nn.Dense else x,  # noqa: E721
    "in a tuple": lambda layer, op, x: op.tanh(x) if type(layer) in (nn.Dense, nn.Flatten) else x,
    "in a dict": lambda layer, op, x: getattr(op, ACTS[type(layer)])(x),
    "is": lambda layer, op, x: op.tanh(x) if type(layer) is nn.Dense else x,
    "by __class__": lambda layer, op, x: op.tanh(x) if layer.__class__ is nn.Dense else x,
    "an instance": lambda layer, op, x: op.tanh(x) if isinstance(layer, nn.Dense) else x,
}


@pytest.mark.parametrize("how", BY_TYPE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_code_that_asks_for_the_type_of_a_layer_gets_its_class(how, dtype):
    nets, _ = pair(lambda: Takes(lambda block, op, x: BY_TYPE[how](block.dense, op, x)), dtype)
    assert_alike(nets)


def test_classes_have_their_methods_again_after_a_trace_that_fails_too():
    names = ("__getattribute__", "__setattr__")
    before = [vars(kind).get(name) for kind in (Takes, nn.Dense, gluon.HybridBlock) for name in names]
    pair(lambda: Takes(left, aux=0), "bfloat16")[0][1](X)
    with pytest.raises(ValueError, match="cannot be traced"):
        pair(lambda: Takes(lambda block, op, x: x.asscalar()), "bfloat16")[0][1](X)
    assert before == [vars(kind).get(name) for kind in (Takes, nn.Dense, gluon.HybridBlock) for name in names]
