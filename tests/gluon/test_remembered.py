"""What of Python a graph remembers: FP32 nets that are not hybridized follow each change, and so do converted ones."""

from __future__ import annotations

import copy
import random
import re
import warnings
from array import array
from collections import deque
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from kit.twins import FLAGS
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.hook import hook_of

DTYPES = ["float16", "bfloat16"]
X = mx.nd.array(np.random.RandomState(0).uniform(0.5, 1, (4, 3)))
FACTOR = 1.0

pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


class Takes(nn.HybridBlock):
    """Calls ``compute(block, op, x)`` behind a dense layer."""

    def __init__(self, compute, **attributes):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=3)
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def hybrid_forward(self, op, x):
        return self.compute(self, op, self.dense(x))


class Around(nn.HybridBlock):
    def __init__(self, inner):
        super().__init__()
        with self.name_scope():
            self.inner, self.last = inner, nn.Dense(2, in_units=3)

    def hybrid_forward(self, op, x):
        return self.last(self.inner(x))


def pair(make, dtype, nested=False):
    """The net of ``make``, plain and converted, with the same weights; and what is to be changed in each."""
    nets, inner = [], []
    for how in (None, dtype):
        inner.append(make())
        net = Around(inner[-1]) if nested else inner[-1]
        mx.random.seed(3)
        net.initialize(mx.init.Xavier())
        nets.append(mxmp.convert(net, how) if how else net)
    return nets, inner


def assert_alike(nets, training=False):
    outs = []
    for net in nets:
        with autograd.record(training):
            outs.append(net(X))
    one, other = (out if isinstance(out, list) else [out] for out in outs)
    for low, full in zip(other, one):
        np.testing.assert_allclose(low.asnumpy(), full.asnumpy(), rtol=0.03, atol=0.02)


def set_factor(net, value):
    global FACTOR
    FACTOR = value


def closing_over():
    scale = {"s": 1.0}
    net = Takes(lambda block, op, x: x * scale["s"])
    net.scale = scale
    return net


class OfClass(Takes):
    tau = 1.0

    def helper(self, x):
        return x * self.tau

    def hybrid_forward(self, op, x):
        return self.helper(self.dense(x))


class Settings:
    tau = 1.0


class MoreSettings(Settings):
    pass


class Slotted:
    __slots__ = ("tau",)

    def __init__(self):
        self.tau = 1.0


class Called:
    tau = 1.0

    def __call__(self, x):
        return x * self.tau


def written(x):
    return x


def factor():
    return factor.value


called = Called()


factor.value = 1.0
module = ModuleType("settings")
module.tau, module.of, module.inner = 1.0, {"tau": 1.0}, SimpleNamespace(tau=1.0)


CHANGES = {
    "in a deque": (lambda: Takes(lambda b, op, x: x * sum(b.c), c=deque([0.5], 3)), lambda b, v: b.c.append(v)),
    "in an array": (
        lambda: Takes(lambda b, op, x: x * b.c[0], c=array("d", [1.0])),
        lambda b, v: b.c.__setitem__(0, v),
    ),
    "in a slot": (lambda: Takes(lambda b, op, x: x * b.c.tau, c=Slotted()), lambda b, v: setattr(b.c, "tau", v)),
    "of a global class": (lambda: Takes(lambda b, op, x: x * Settings.tau), lambda b, v: setattr(Settings, "tau", v)),
    "of the base of a class": (
        lambda: Takes(lambda b, op, x: x * MoreSettings.tau),
        lambda b, v: setattr(Settings, "tau", v),
    ),
    "of the class of an object": (
        lambda: Takes(lambda b, op, x: x * b.c.tau, c=MoreSettings()),
        lambda b, v: setattr(Settings, "tau", v),
    ),
    "of a function": (lambda: Takes(lambda b, op, x: x * factor()), lambda b, v: setattr(factor, "value", v)),
    "of a module": (lambda: Takes(lambda b, op, x: x * module.tau), lambda b, v: setattr(module, "tau", v)),
    "in a dict of a module": (
        lambda: Takes(lambda b, op, x: x * module.of["tau"]),
        lambda b, v: module.of.update(tau=v),
    ),
    "in an object of a module": (
        lambda: Takes(lambda b, op, x: x * module.inner.tau),
        lambda b, v: setattr(module.inner, "tau", v),
    ),
    "the learning rate": (
        lambda: Takes(lambda b, op, x: x * b.c.learning_rate, c=mx.optimizer.SGD(learning_rate=1.0)),
        lambda b, v: b.c.set_learning_rate(v),
    ),
    "number": (lambda: Takes(lambda b, op, x: x / b.tau, tau=1.0), lambda b, v: setattr(b, "tau", v)),
    "text": (
        lambda: Takes(lambda b, op, x: op.Activation(x, b.act) if b.act else x, act=None),
        lambda b, v: setattr(b, "act", "relu" if v > 1 else "tanh"),
    ),
    "in a list": (lambda: Takes(lambda b, op, x: x * b.c[1], c=[3, 1.0]), lambda b, v: b.c.__setitem__(1, v)),
    "in a dict": (lambda: Takes(lambda b, op, x: x * b.c["a"][0], c={"a": [1.0]}), lambda b, v: b.c.update(a=[v])),
    "in an object": (
        lambda: Takes(lambda b, op, x: x * b.c.tau, c=SimpleNamespace(tau=1.0)),
        lambda b, v: setattr(b.c, "tau", v),
    ),
    "in a NumPy array": (
        lambda: Takes(lambda b, op, x: x * float(b.c[0]), c=np.ones(2)),
        lambda b, v: b.c.__setitem__(0, v),
    ),
    "of a class": (lambda: OfClass(None), lambda b, v: setattr(type(b), "tau", v)),
    "global": (lambda: Takes(lambda b, op, x: x * FACTOR), set_factor),
    "function of the module": (
        lambda: Takes(lambda b, op, x: written(x)),
        lambda b, v: globals().update(written=lambda x: x * v),
    ),
    "in a global object that is called": (
        lambda: Takes(lambda b, op, x: called(x)),
        lambda b, v: setattr(called, "tau", v),
    ),
    "closed over": (closing_over, lambda b, v: b.scale.update(s=v)),
    "function": (
        lambda: Takes(lambda b, op, x: b.f(x), f=lambda x: x),
        lambda b, v: setattr(b, "f", lambda x: x * v),
    ),
    "new attribute": (
        lambda: Takes(lambda b, op, x: x * getattr(b, "late", 1.0)),
        lambda b, v: setattr(b, "late", v),
    ),
    "that of MXNet's layer": (
        lambda: Takes(lambda b, op, x: b.leaky(x - 1), leaky=nn.LeakyReLU(0.1)),
        lambda b, v: setattr(b.leaky, "_alpha", v),
    ),
    "its activation": (
        lambda: Takes(lambda b, op, x: x),
        lambda b, v: setattr(b.dense, "act", nn.Activation("relu" if v > 1 else "sigmoid")),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_that_the_code_reads_may_change_between_calls(kind, nested, dtype):
    make, change = CHANGES[kind]
    nets, inner = pair(make, dtype, nested)
    assert_alike(nets)
    for value in (0.5, 2.0, 0.5, 2.0):
        for each in inner:
            change(each, value)
        assert_alike(nets)
        assert_alike(nets, training=True)
    set_factor(None, 1.0)
    OfClass.tau = Settings.tau = factor.value = module.tau = module.of["tau"] = module.inner.tau = 1.0


# Code of the user's in other places than the net's own ``hybrid_forward``.
class OfFactor(nn.HybridBlock):
    def hybrid_forward(self, op, x):
        return x * FACTOR


class OfItsBase(OfFactor):
    def hybrid_forward(self, op, x):
        return super().hybrid_forward(op, x) + 1


class Forward(nn.HybridBlock):
    def forward(self, x):
        return super().forward(x * FACTOR)

    def hybrid_forward(self, op, x):
        return x + 1


class OfKinds(nn.HybridBlock):
    static = staticmethod(lambda x: x * FACTOR)
    of_class = classmethod(lambda cls, x: x * FACTOR)
    factor = property(lambda self: FACTOR)

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def hybrid_forward(self, op, x):
        return self.compute(self, x)


class Helper:
    def of(self, x):
        return x * FACTOR

    __call__ = of


class Holder:
    def __init__(self):
        self.inner = Helper()

    def through(self, x):
        return self.inner.of(x)


helper, holder, HELPERS = Helper(), Holder(), {"of": partial(Helper().of)}


def taking_default(block, op, x, of=helper.of):
    return of(x)


CODE = {
    "hybrid_forward": OfFactor,
    "of its base": OfItsBase,
    "of a base by name": lambda: OfKinds(lambda b, x: OfFactor.hybrid_forward(b, None, x)),
    "forward": Forward,
    "static method": lambda: OfKinds(lambda b, x: b.static(x)),
    "class method": lambda: OfKinds(lambda b, x: b.of_class(x)),
    "property": lambda: OfKinds(lambda b, x: x * b.factor),
    "method of an object": lambda: Takes(lambda b, op, x: b.c.of(x), c=Helper()),
    "of an object inside": lambda: Takes(lambda b, op, x: b.c.through(x), c=Holder()),
    "object that is called": lambda: Takes(lambda b, op, x: b.c(x), c=Helper()),
    "bound method": lambda: Takes(lambda b, op, x: b.c(x), c=Helper().of),
    "in a list": lambda: Takes(lambda b, op, x: b.c[0](x), c=[Helper().of]),
    "partial": lambda: Takes(lambda b, op, x: b.c(x), c=partial(lambda x: x * FACTOR)),
    "default": lambda: Takes(taking_default),
    "of a global object": lambda: Takes(lambda b, op, x: helper.of(x)),
    "of one inside": lambda: Takes(lambda b, op, x: holder.through(x)),
    "global object that is called": lambda: Takes(lambda b, op, x: helper(x)),
    "global class": lambda: Takes(lambda b, op, x: Helper().of(x)),
    "in a global dict": lambda: Takes(lambda b, op, x: HELPERS["of"](x)),
}


@pytest.mark.filterwarnings("ignore:nothing in .* computes in bfloat16")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CODE)
def test_a_global_may_change_wherever_the_code_is_that_reads_it(kind, nested):
    nets, _ = pair(CODE[kind], "bfloat16", nested)
    for value in (1.0, 0.5, 2.0):
        set_factor(None, value)
        assert_alike(nets)
    set_factor(None, 1.0)


def test_an_iterator_that_the_code_reads_goes_on_in_each_call_and_is_said():
    nets, _ = pair(lambda: Takes(lambda b, op, x: x * next(b.numbers), numbers=count(1)), "bfloat16")

    def call():
        for _ in range(4):
            assert_alike(nets, training=True)

    with pytest.warns(UserWarning, match="numbers"):
        call()


def test_a_value_that_comes_back_has_its_graph_still_and_one_that_is_not_read_makes_none():
    nets, inner = pair(CHANGES["number"][0], "float16")
    for value in (1.0, 0.5, 1.0, 0.5, 1.0):
        inner[1].tau = value
        inner[1].unread = value * 3
        globals()["tau"] = value * 5  # the code reads the attribute of this name
        nets[1](X)
    assert len(hook_of(nets[1]).graphs) == 2


def test_a_value_that_changes_in_each_call_is_right_and_warned_of_by_name():
    nets, inner = pair(CHANGES["number"][0], "float16")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for i in range(1, 24):
            for each in inner:
                each.tau = i / 4
            assert_alike(nets)
    (text,) = [str(w.message) for w in warned if "16 values" in str(w.message)]
    assert re.match(r"'takes\d+\.tau', which the code of 'takes\d+' reads, had more than 16 values", text)
    assert len(hook_of(nets[1]).graphs) == 16


DRAWS = {
    "numpy.random": lambda b, op, x: x * np.random.rand(),
    "random": lambda b, op, x: x * (1 if random.random() < 0.5 else 2),
    "RandomState": lambda b, op, x: x * b.rng.rand(),
    "Generator": lambda b, op, x: x * b.generator.random(),
    "Random": lambda b, op, x: x * b.python.random(),
    "mx.random": lambda b, op, x: x * (1 if mx.nd.random.uniform(0, 1, 1).asscalar() < 0.5 else 2),
    "an array": lambda b, op, x: x * b.array.asscalar(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_code_that_draws_random_numbers_or_reads_arrays_runs_in_each_call_and_says_so(kind):
    runs = []
    for how in (None, "float16"):
        mx.random.seed(3)
        net = Takes(DRAWS[kind], rng=np.random.RandomState(1), python=random.Random(1), array=mx.nd.array([2.0]))
        net.generator = np.random.default_rng(1)
        net.initialize(mx.init.Xavier())
        net(X)
        if how:
            mxmp.convert(net, how)
        random.seed(5), np.random.seed(5), mx.random.seed(5)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = []
            for i in range(6):
                net.array[:] = i + 1
                found.append(net(X).asnumpy())
        runs.append(found)
    assert sum("traced anew in each call" in str(w.message) for w in warned) == 1
    np.testing.assert_allclose(*runs, rtol=0.01, atol=1e-3)


# -- what a trace leaves behind ---------------------------------------------------------------------


def left(block, op, x):
    block.aux = op.mean(op.square(x))
    return x * 2


def nest(block, op, x):
    block.aux = {"a": [x + 1, 3], "b": (x * 2, None)}
    return x + 1


def same_as_output(block, op, x):
    block.aux = y = op.tanh(x)
    return y


def calls(block, op, x):
    block.calls += 1
    block.aux = block.calls
    return x * block.calls


def shapes(block, op, x):
    block.aux = x.shape
    return x


LEFT = {"an output": left, "nested": nest, "the output itself": same_as_output, "a counter": calls, "shape": shapes}


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", LEFT)
def test_a_result_in_an_attribute_is_that_of_each_call(kind, flags, nested, dtype):
    nets, inner = pair(lambda: Takes(LEFT[kind], aux=0, calls=0), dtype, nested)
    if FLAGS[flags] is not None:
        nets[1].hybridize(**FLAGS[flags])
    for scale in (1, 2, 3):
        outs = [net(X * scale) for net in nets]
        assert_nearly(as_numpy(outs[1]), as_numpy(outs[0])) if not isinstance(outs[0], tuple) else None
        assert_nearly(as_numpy(inner[1].aux), as_numpy(inner[0].aux))
        assert inner[0].calls == inner[1].calls


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
        low = hook_of(net) is not None
        before = block.dense.weight.data().asnumpy()
        kind, scale = (mxmp.Trainer, {"loss_scale": 64}) if low else (gluon.Trainer, {})
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1}, **scale)
        for _ in range(5):
            with autograd.record():
                loss = net(X).square().mean() + 3 * block.aux
            trainer.backward(loss) if low else loss.backward()
            trainer.step(1)
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


def test_a_result_in_a_list_or_dict_of_before_is_refused_in_words():
    for keep in (lambda b, op, x: (b.kept.append(x), x)[1], lambda b, op, x: (b.table.update(a=x), x)[1]):
        nets, _ = pair(lambda keep=keep: Takes(keep, kept=[], table={}), "float16")
        with pytest.raises(ValueError, match=r"puts a result into '(kept|table)'.*assign a new one.*as an output"):
            nets[1](X)
        assert (nets[1].kept, nets[1].table) == ([], {})


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
